"""Mistral: Llama, whose first models saw a window."""

from rlcore_torchkit.architectures.architecture import Architecture

ARCHITECTURE = Architecture(model_type="mistral", class_name="MistralForCausalLM", window_key="sliding_window")
