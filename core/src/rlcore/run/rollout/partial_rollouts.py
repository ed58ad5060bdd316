"""Continues turns that a refit interrupted: their next seed, and stop strings that span the interruption."""

from bisect import bisect_left
from collections.abc import Callable, Sequence

import numpy as np
from attrs import evolve

from rlcore.run.rollout.request_feed import Completion
from rlcore.spi import FinishReason
from rlcore.spi.arrays import Int32Array

Decode = Callable[[Sequence[int] | Int32Array], str]


def seed_after(seed: int, num_said: int) -> int:
    """The seed of the rest of a turn. A generator may draw a request's random numbers from its seed alone: the same seed would
    repeat, after the cut, those that chose the tokens before it."""
    return (
        seed if not num_said else int(np.random.SeedSequence([seed, num_said]).generate_state(1, np.uint64)[0] >> np.uint64(1))
    )


def until_stop(begun: Sequence[Int32Array], sampled: Completion, decode: Decode) -> Completion:
    """The rest of a turn up to the first stop string of the whole turn, which a generator that began behind the cut cannot see
    where it lies across it. What it then said after the stop string is left out."""
    stops = sampled.wanted.sampling.stop_strings
    if not begun or not stops or not len(sampled.tokens):
        return sampled
    before = np.concatenate(begun)

    def has_stopped(number: int) -> bool:
        text = decode(np.concatenate([before, sampled.tokens[:number]]))
        return any(stop in text for stop in stops)

    number = bisect_left(range(len(sampled.tokens) + 1), True, key=has_stopped)
    if number > len(sampled.tokens):
        return sampled
    experts, mask = sampled.routed_experts, sampled.sampling_mask
    left_out = len(sampled.tokens) - number
    return evolve(
        sampled,
        tokens=sampled.tokens[:number],
        logprobs=sampled.logprobs[:number],
        weight_versions=sampled.weight_versions[:number],
        finish_reason=FinishReason.STOP,
        routed_experts=None if experts is None else experts[: len(experts) - left_out],
        sampling_mask=None if mask is None else mask.slice(0, number),
    )
