"""Llama, from which all families descend."""

from rlcore_torchkit.architectures.architecture import Architecture

ARCHITECTURE = Architecture(model_type="llama", class_name="LlamaForCausalLM", defaults={"max_position_embeddings": 2048})
