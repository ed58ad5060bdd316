"""Observer that sees to it that an update comes while samples run: a generator apart waits for it in their midst."""

import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

from rlcore.spi import FinishReason, GenerateRequest, GenerateResult, SampleFeed, StreamRequest, TrainStepRequest, hookimpl
from rlcore.spi.arrays import Int64Array

MARKS = "begun-updates"
"""In the working directory, which the processes of a run share: a file for each update, named by the version before it."""
NEEDED = 36
"""Samples of a step."""
TOKEN_S = 0.1
"""Seconds a token takes from when the step may have its samples until its update begins."""


class Patience:
    """Of the trainer, a mark as an update begins; of the generator, a stream that waits for it."""

    @hookimpl(wrapper=True)
    def train_step(self, request: TrainStepRequest) -> Generator[None, Any, Any]:
        Path(MARKS).mkdir(exist_ok=True)
        (Path(MARKS) / str(request.weight_version)).touch()
        return (yield)

    @hookimpl(wrapper=True)
    def stream(self, request: StreamRequest) -> Generator[None, Any, Any]:
        # The generator reads the same object, which is frozen for everybody else.
        object.__setattr__(request, "feed", PatientFeed(request.feed, request.weight_version))
        return (yield)


class PatientFeed:
    """A feed that is slow once the samples of a step are there and that brings nothing while their update goes on, at whose end
    the stream ends."""

    num_ended = 0
    """Samples of all streams of this process."""

    def __init__(self, feed: SampleFeed, weight_version: int) -> None:
        self._feed = feed
        self._mark = Path(MARKS) / str(weight_version)
        self._num_needed = NEEDED * (weight_version + 1)

    def take(self, *, wait: bool) -> Sequence[GenerateRequest] | None:
        taken = self._feed.take(wait=wait)
        if not wait and PatientFeed.num_ended >= self._num_needed and taken is not None:
            time.sleep(TOKEN_S)
            while self._mark.exists() and taken is not None:
                time.sleep(0.01)
                more = self._feed.take(wait=False)
                taken = None if more is None else [*taken, *more]
        return taken

    def deliver(self, samples: Int64Array, result: GenerateResult) -> None:
        PatientFeed.num_ended += int((result.finish_reasons != FinishReason.ABORTED).sum())
        self._feed.deliver(samples, result)

    def end(self) -> None:
        self._feed.end()


OBSERVER = Patience()
