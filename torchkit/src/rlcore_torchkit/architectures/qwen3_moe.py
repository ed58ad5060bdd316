"""Qwen3-MoE: Qwen3 with experts in all or some of its layers."""

from rlcore_torchkit.architectures.architecture import Architecture

ARCHITECTURE = Architecture(
    model_type="qwen3_moe",
    class_name="Qwen3MoeForCausalLM",
    has_qk_norms=True,
    aliases={"num_experts": "num_local_experts"},  # as transformers 5 writes what the Hub's files call num_experts
    defaults={
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
)
