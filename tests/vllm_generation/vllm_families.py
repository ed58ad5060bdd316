"""Which families the tests of refits show."""

MODELS = {
    "dense": ("qwen2", False),
    "tied": ("qwen3", True),
    "experts": ("qwen3_moe", True),
}
"""Families that torchkit describes: model_type, and whether the head is tied."""
OTHERS = ("gemma3_text", "glm4_moe", "phi3", "cohere", "gpt2", "deepseek_v3")
"""Families that no description is for: a tied one with a window, one with biases of routers, one of fused projections,
one with scaled logits, one of learned positions, one of latent attention."""
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32, "q_lora_rank": 32}
SIZES = {
    **{name: {"head_dim": 32} for name in OTHERS},
    "deepseek_v3": {**LATENT, "head_dim": 64, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
}
"""Sizes that vLLM's attention has on a CPU, and what only vLLM reads."""
IN_PROCESSES = "llama"
"""The family of test_transfer_processes."""
SHOWN = {IN_PROCESSES, *OTHERS, *(model_type for model_type, _ in MODELS.values())}
