"""Qwen3-MoE: Qwen3 with experts in all or some of its layers."""

from rlcore_torchkit.architectures.architecture import Architecture

ARCHITECTURE = Architecture(
    model_type="qwen3_moe",
    class_name="Qwen3MoeForCausalLM",
    has_qk_norms=True,
    aliases={"num_experts": "num_local_experts"},  # as transformers 5 writes what the Hub's files call num_experts
)
