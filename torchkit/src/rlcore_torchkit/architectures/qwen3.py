"""Qwen3: Llama with norms of queries and keys."""

from rlcore_torchkit.architectures.architecture import Architecture

ARCHITECTURE = Architecture(
    model_type="qwen3",
    class_name="Qwen3ForCausalLM",
    has_qk_norms=True,
    defaults={"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768},
)
