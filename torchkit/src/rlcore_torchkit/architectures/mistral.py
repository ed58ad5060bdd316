"""Mistral: Llama, whose first models saw a window."""

from rlcore_torchkit.architectures.architecture import Architecture

ARCHITECTURE = Architecture(
    model_type="mistral",
    class_name="MistralForCausalLM",
    window_key="sliding_window",
    defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
)
