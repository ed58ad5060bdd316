"""Speculative decoding (arXiv:2211.17192) by n-grams: what vLLM is told, and what goes without it."""

from typing import Any

from rlcore.spi import capabilities
from rlcore_vllm.config import VllmConfig

LOOKUP = {"prompt_lookup_min": 1, "prompt_lookup_max": 4}
"""The last tokens, as many as that, are looked for earlier in the sequence."""
LOST = frozenset(
    {
        # What a guess takes of a sample's random numbers depends on how many tokens of it a step has room for.
        capabilities.PER_SAMPLE_SEEDS,
        # Guesses that are accepted pass by the sampler, from which what was kept is read off.
        capabilities.SAMPLING_MASK,
        # Tokens that are refused have been through the experts too.
        capabilities.ROUTED_EXPERTS,
        capabilities.ADAPTER_REFIT,
    }
)
"""What goes without where tokens are guessed."""


def speculative_arguments(config: VllmConfig) -> dict[str, Any]:
    """Return vLLM's arguments for a section."""
    if not config.speculative_ngram:
        return {}
    return {"speculative_config": {"method": "ngram", "num_speculative_tokens": config.speculative_ngram, **LOOKUP}}


def lost_capabilities(config: VllmConfig) -> frozenset[str]:
    """What a section's speculation takes away."""
    return LOST if config.speculative_ngram else frozenset()
