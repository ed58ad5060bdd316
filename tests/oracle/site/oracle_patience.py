"""Observer that sees to it that each update comes while samples run: the generator stops in their midst until it comes."""

import time
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np

from rlcore.spi import FinishReason, GenerateRequest, GenerateResult, SampleFeed, StreamRequest, hookimpl
from rlcore.spi.arrays import Int64Array

PROMPTS_PER_STEP = 6


class Groups:
    """The groups that the generator was asked for, in the order in which it gives them places."""

    def __init__(self) -> None:
        self._num_left: dict[bytes, int] = {}
        """By prompt, samples that have not ended."""

    def add(self, request: GenerateRequest) -> list[bytes]:
        """The group of each sample of a request."""
        prompts = [request.prompts.sequence(row) for row in range(len(request.prompts.lengths))]
        keys = [_prompt(prompt) for prompt in prompts]
        for row in sorted(range(len(prompts)), key=lambda row: -len(prompts[row])):
            self._num_left.setdefault(keys[row], request.num_samples)
        return [key for key in keys for _ in range(request.num_samples)]

    def end(self, groups: Sequence[bytes]) -> None:
        """A sample of each of these has ended."""
        for group in groups:
            self._num_left[group] -= 1

    def has_steps(self, number: int) -> bool:
        """Whether all samples of the first so many steps have ended. They can be trained on then, in whatever order the
        driver takes what has ended."""
        needed = list(self._num_left.values())[: number * PROMPTS_PER_STEP]
        return len(needed) == number * PROMPTS_PER_STEP and not any(needed)


ALL = Groups()
"""Of all streams of this process."""


class PatientFeed:
    """A feed that keeps the generator waiting once the step's samples are there, until more is asked for or the stream ends."""

    def __init__(self, feed: SampleFeed, weight_version: int) -> None:
        self._feed = feed
        self._num_steps = weight_version + 1
        self._groups: list[bytes] = []
        """Of each sample of the stream."""

    def take(self, *, wait: bool) -> Sequence[GenerateRequest] | None:
        taken = self._feed.take(wait=wait)
        while not wait and taken is not None and not taken and ALL.has_steps(self._num_steps):
            time.sleep(0.01)
            taken = self._feed.take(wait=False)
        for request in taken or ():
            self._groups += ALL.add(request)
        return taken

    def deliver(self, samples: Int64Array, result: GenerateResult) -> None:
        ended = samples[result.finish_reasons != FinishReason.ABORTED]
        ALL.end([self._groups[sample] for sample in ended.tolist()])
        self._feed.deliver(samples, result)

    def end(self) -> None:
        self._feed.end()


class Patience:
    """Of the generator alone."""

    @hookimpl(wrapper=True)
    def stream(self, request: StreamRequest) -> Generator[None, Any, Any]:
        # The generator reads the same object, which is frozen for everybody else.
        object.__setattr__(request, "feed", PatientFeed(request.feed, request.weight_version))
        return (yield)


def _prompt(tokens: Any) -> bytes:
    """What a sequence begins with, up to its first equals sign: the sum's, which no other group has."""
    global _equals
    if _equals is None:
        _equals = int(tokens[-1])  # of a sample that has said nothing yet
    return bytes(tokens[: int(np.flatnonzero(tokens == _equals)[0]) + 1].tobytes())


_equals: int | None = None

OBSERVER = Patience()
