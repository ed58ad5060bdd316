"""Which families the tests of refits show."""

MODELS = {
    "dense": ("qwen2", False),
    "tied": ("qwen3", True),
    "experts": ("qwen3_moe", True),
}
"""Families that torchkit describes: model_type, and whether the head is tied."""
OTHERS = ("gemma3_text", "glm4_moe", "phi3", "cohere", "gpt2")
"""Families that no description is for: a tied one with a window, one with biases of routers, one of fused projections,
one with scaled logits, one of learned positions."""
IN_PROCESSES = "llama"
"""The family of test_transfer_processes."""
SHOWN = {IN_PROCESSES, *OTHERS, *(model_type for model_type, _ in MODELS.values())}
