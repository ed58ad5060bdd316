"""Capability names: what a recipe may need and a provider declares.

A declared capability must pass its part of the conformance kit; a recipe that needs an undeclared one is refused before
anything is allocated. A third party's own names contain a colon (`acme:speculative`); any other unknown name is an error.
"""

# trainers
REFERENCE_POLICY = "reference_policy"
"""get_logprobs(model="reference"): a frozen copy of the initial weights."""
ENTROPY = "entropy"
"""Entropy in get_logprobs, and in train_step with a gradient."""
SAVE_HF = "save_hf"
"""save_state(kind="hf"): a directory that transformers loads."""

# generators
TOP_K = "top_k"
TOP_P = "top_p"
STOP_STRINGS = "stop_strings"
PER_SAMPLE_SEEDS = "per_sample_seeds"
"""A sample depends on its prompt, seed and weights alone, not on the batch around it (same device, same dtype)."""
EXACT_LOGPROBS = "exact_logprobs"
"""In float32 the sampled log-probabilities equal a plain forward pass within 1e-4, so nothing need recompute them."""

# environments
CHEAP_RESET = "cheap_reset"
"""reset is quick and depends on its row alone: the core resets every row once before a run, to check prompt lengths."""

# trainers and generators
RESIDENCY = "residency"
"""set_residency frees and restores device memory; without it only the fully resident state is accepted."""
REFIT_IN_PROCESS = "refit.in_process"
"""Weights handed over within one process; with RefitRequest.may_alias, without a copy."""

KNOWN: frozenset[str] = frozenset(
    {
        REFERENCE_POLICY,
        ENTROPY,
        SAVE_HF,
        TOP_K,
        TOP_P,
        STOP_STRINGS,
        PER_SAMPLE_SEEDS,
        EXACT_LOGPROBS,
        RESIDENCY,
        REFIT_IN_PROCESS,
        CHEAP_RESET,
    }
)
