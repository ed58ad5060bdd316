"""Qwen3: Llama with norms of queries and keys."""

from rlcore_torchkit.architectures.architecture import Architecture

ARCHITECTURE = Architecture(model_type="qwen3", class_name="Qwen3ForCausalLM", has_qk_norms=True)
