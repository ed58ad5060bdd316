"""Speculative decoding (arXiv:2211.17192): what vLLM is told, and what goes without it."""

from typing import Any

from rlcore.schema.file_limits import expanded
from rlcore.spi import capabilities
from rlcore_vllm.setup.config import VllmConfig

LOOKUP = {"prompt_lookup_min": 1, "prompt_lookup_max": 4}
"""The last tokens, as many as that, are looked for earlier in the sequence."""
LOST = frozenset(
    {
        # What a guess takes of a sample's random numbers depends on how many tokens of it a step has room for.
        capabilities.PER_SAMPLE_SEEDS,
        # Guesses that are accepted pass by the sampler, from which what was kept is read off.
        capabilities.SAMPLING_MASK,
        # Grammars follow tokens that are guessed, which nothing here compares with sampling without guesses.
        capabilities.STRUCTURED_OUTPUT,
        # Tokens that are refused have been through the experts too.
        capabilities.ROUTED_EXPERTS,
        capabilities.ADAPTER_REFIT,
        capabilities.MANY_ADAPTERS,
    }
)
"""Capabilities that are lost where tokens are guessed."""
LOST_TO_DRAFTERS = frozenset({capabilities.DISCARD_WEIGHTS})
"""Capabilities that are lost besides where a model drafts: no refit brings its weights again."""


def num_guessed(config: VllmConfig) -> int:
    """Tokens of a sequence that are guessed in a step."""
    return config.speculative_tokens if config.has_drafter else config.speculative_ngram


def drafts_sometimes(config: VllmConfig) -> bool:
    """Return whether some steps have more sequences than are drafted for."""
    most = config.speculative_most_sequences
    return bool(num_guessed(config)) and most is not None and most < config.max_num_seqs


def speculative_arguments(config: VllmConfig, device: str) -> dict[str, Any]:
    """Return vLLM's arguments for a section on a kind of device."""
    number, most = num_guessed(config), config.speculative_most_sequences
    if not number:
        return {}
    if not config.has_drafter:
        # Looked for on the host, they keep vLLM from scheduling a step before the one before it has ended. On the device, vLLM
        # 0.32 looks for as many in every step.
        on_host = device == "cpu" or drafts_sometimes(config)
        how: dict[str, Any] = {"method": "ngram" if on_host else "ngram_gpu", **LOOKUP}
    else:
        # The policy's own format is "dummy", where a trainer sends its weights.
        how = {"method": config.speculative_method, "draft_load_config": {"load_format": "hf"}}
        if config.speculative_model is not None:  # else vLLM reads the head from the policy's files
            how["model"] = str(expanded(config.speculative_model))
    if most is not None and drafts_sometimes(config):
        how["num_speculative_tokens_per_batch_size"] = [(1, most, number), (most + 1, config.max_num_seqs, 0)]
    return {"speculative_config": {"num_speculative_tokens": number, **how}}


def lost_capabilities(config: VllmConfig) -> frozenset[str]:
    """Return the capabilities that a section's speculation takes away."""
    if not num_guessed(config):
        return frozenset()
    return LOST | LOST_TO_DRAFTERS if config.has_drafter else LOST
