"""Divides the samples of a request among engines: equal work for each, samples of one prompt together."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from rlcore.spi import GenerateRequest, RaggedTokens, TokenReader
from rlcore.spi.arrays import Int64Array, gather_ragged
from rlcore_vllm.engines.sampling import TOKENS_ALONE, Samples

PARTS_PER_ENGINE = 4
"""A prompt's samples are parted only where there would be fewer parts than this for each engine."""

STICKINESS = 0.125
"""Surplus of work, as a share of another engine's, with which an engine is still given a conversation that it has had."""


def dispatch(
    request: GenerateRequest,
    limits: Int64Array,
    busy: Sequence[int],
    places: Mapping[int, int] = MappingProxyType({}),
    *,
    adapter: int = 0,
) -> list[Samples]:
    """Return each engine's part of the samples; `limits` int64 [S] are their most tokens, `busy` the engines' work so far,
    `places` the engines of conversations, `adapter` the engines' number of the request's adapter.

    Work is counted in tokens at the samples' limits, and the largest parts are dealt first, each to the engine with the least,
    or to that which has had its conversation, where that has little more to do.
    """
    num_engines = len(busy)
    num_samples, num_prompts = request.num_samples, request.prompts.num_sequences
    pieces = 1 if num_engines == 1 else max(1, -(-PARTS_PER_ENGINE * num_engines // max(1, num_prompts)))
    parts = [
        part
        for numbers in np.arange(num_prompts * num_samples).reshape(num_prompts, num_samples)
        if num_samples
        for part in np.array_split(numbers, min(pieces, num_samples))
    ]
    lengths = request.prompts.lengths
    work = [int(lengths[part[0] // num_samples] + limits[part].sum()) for part in parts]
    totals, dealt = list(busy), [list[Int64Array]() for _ in busy]
    for index in sorted(range(len(parts)), key=lambda index: -work[index]):
        least = min(totals)
        engine = None if request.conversations is None else places.get(int(request.conversations[parts[index][0]]))
        if engine is None or totals[engine] > least + least * STICKINESS + work[index]:
            engine = totals.index(least)
        dealt[engine].append(parts[index])
        totals[engine] += work[index]
    return [_select(request, limits, parts, adapter) for parts in dealt]


def work_of(request: GenerateRequest, limits: Int64Array) -> Int64Array:
    """int64 [S]: what each sample may cost, in tokens."""
    return np.repeat(request.prompts.lengths, request.num_samples) + limits


def _select(request: GenerateRequest, limits: Int64Array, parts: list[Int64Array], adapter: int) -> Samples:
    numbers = np.sort(np.concatenate([np.zeros(0, np.int64), *parts]))
    prompts, prompt_of = np.unique(numbers // request.num_samples, return_inverse=True)
    positions, offsets = gather_ragged(request.prompts.offsets, prompts)
    return Samples(
        prompts=RaggedTokens(tokens=request.prompts.tokens[positions], offsets=offsets),
        prompt_of=prompt_of.astype(np.int64),
        numbers=numbers,
        seeds=request.seeds[numbers],
        limits=limits[numbers],
        sampling=request.sampling,
        routed_experts=request.routed_experts,
        sampling_mask=request.sampling_mask,
        images=None if request.images is None else tuple(request.images[prompt] for prompt in prompts.tolist()),
        adapter=adapter,
        read=None if request.readers is None else [_read(request.readers[number]) for number in numbers.tolist()],
        reads_prompt=None if request.readers is None else [_reads_prompt(request.readers[one]) for one in numbers.tolist()],
    )


def _reads_prompt(reader: TokenReader | None) -> bool:
    return reader is not None and reader.on_prompt is not None


def _read(reader: TokenReader | None) -> int | None:
    """Return Samples.read of one sample; one that is read for its end alone sends no tokens."""
    if reader is None or (reader.on_tokens is None and reader.on_prompt is None):
        return None
    return TOKENS_ALONE if reader.num_logprobs is None else reader.num_logprobs
