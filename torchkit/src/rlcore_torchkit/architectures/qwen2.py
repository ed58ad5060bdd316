"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values."""

from rlcore_torchkit.architectures.architecture import Architecture

ARCHITECTURE = Architecture(
    model_type="qwen2",
    class_name="Qwen2ForCausalLM",
    has_qkv_biases=True,
    defaults={"num_key_value_heads": 32, "max_position_embeddings": 32768},
)
