"""Checks of requests, finished samples and the mix of seeds, for all generators.

Imports no torch.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from rlcore.spi.arrays import Float32Array, Int16Array, Int32Array, Int64Array, offsets_of
from rlcore.spi.batch import SamplingMask
from rlcore.spi.errors import ContractError
from rlcore.spi.generator import FinishReason, GenerateRequest, GenerateResult, RoutedExperts, SamplingParams


def splitmix64(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A mix of all bits of each number (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014)."""
    with np.errstate(over="ignore"):
        state = state + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


@frozen(kw_only=True, eq=False)
class FinishedSample:
    """One sample that ended. Travels between processes."""

    number: int
    """Its number in the request."""
    tokens: Int32Array
    """int32 [T]"""
    logprobs: Float32Array
    """float32 [T]"""
    weight_versions: Int32Array
    """int32 [T]"""
    finish_reason: FinishReason
    sampling_mask: SamplingMask | None = None
    """A row for each of the T tokens; None unless asked for, and where nothing was left out."""
    routed_experts: Int16Array | None = None
    """int16 [prompt and T, L, K]; None unless asked for."""


def join_samples(
    samples: Sequence[FinishedSample], *, routed_experts: bool = False, sampling_mask: bool = False
) -> GenerateResult:
    """The samples one after another, in their numbers' order, with what the request asks to know besides."""
    ordered = sorted(samples, key=lambda sample: sample.number)

    def joined(name: str, dtype: type) -> Any:
        return np.concatenate([np.zeros(0, dtype), *(getattr(sample, name) for sample in ordered)])

    masks = [sample.sampling_mask or SamplingMask.whole(len(sample.tokens)) for sample in ordered]
    return GenerateResult(
        tokens=joined("tokens", np.int32),
        offsets=offsets_of([len(sample.tokens) for sample in ordered]),
        logprobs=joined("logprobs", np.float32),
        weight_versions=joined("weight_versions", np.int32),
        finish_reasons=np.array([sample.finish_reason for sample in ordered], np.uint8),
        routed_experts=_join_experts(ordered) if routed_experts else None,
        sampling_mask=SamplingMask.join(masks) if sampling_mask else None,
    )


def _join_experts(samples: Sequence[FinishedSample]) -> RoutedExperts:
    """The experts of all samples; those of a sample of which none are known are -1."""
    found = [sample.routed_experts for sample in samples if sample.routed_experts is not None]
    shape = max((experts.shape[1:] for experts in found), default=(0, 0))
    parts = [experts if experts.size else np.full((len(experts), *shape), -1, np.int16) for experts in found]
    return RoutedExperts(
        experts=np.concatenate([np.zeros((0, *shape), np.int16), *parts]),
        offsets=offsets_of([len(experts) for experts in parts]),
    )


def check_sampling(sampling: SamplingParams, smallest_temperature: float = 0.0) -> None:
    """ContractError for values that name no distribution; a temperature of 0 always names the most probable token."""
    temperature = sampling.temperature
    bad = [
        f"{name} = {value!r}"
        for name, value, good in (
            ("temperature", temperature, temperature == 0.0 or max(smallest_temperature, 0.0) <= temperature < np.inf),
            ("top_k", sampling.top_k, sampling.top_k >= 0),
            ("top_p", sampling.top_p, 0.0 < sampling.top_p <= 1.0),
            ("stop_strings", sampling.stop_strings, all(sampling.stop_strings)),
        )
        if not good
    ]
    if bad:
        least = f"of 0 or at least {smallest_temperature}" if smallest_temperature else "of at least 0"
        expected = f"a temperature {least}, top_k of at least 0, top_p above 0 and at most 1, no empty stop string"
        raise ContractError(f"generate: found {', '.join(bad)}; expected {expected}")


def sample_limits(request: GenerateRequest, max_sequence_length: int, vocab_size: int) -> Int64Array:
    """int64 [samples]: most tokens of each sample, by `max_tokens` and by the longest sequence.

    ContractError for a prompt with a token that is not in the vocabulary.
    """
    tokens = request.prompts.tokens
    if len(tokens) and (tokens.min() < 0 or tokens.max() >= vocab_size):
        found = f"token ids from {tokens.min()} to {tokens.max()}"
        raise ContractError(f"generate: found {found}; expected ids from 0 to {vocab_size - 1}")
    return np.minimum(request.max_tokens, max_sequence_length - np.repeat(request.prompts.lengths, request.num_samples))
