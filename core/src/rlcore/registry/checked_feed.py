"""A stream's feed as the generator sees it: what it takes is legal, and what it delivers is checked before it counts."""

import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence

import numpy as np
from attrs import define

from rlcore.registry.sample_checks import ExpectedSamples
from rlcore.spi.arrays import BoolArray, Int64Array, check_array
from rlcore.spi.errors import ContractError, RlcoreError
from rlcore.spi.generator import GenerateRequest, GenerateResult, SampleFeed


@define(eq=False)
class _Taken:
    """A request that the generator has taken, until all its samples are delivered."""

    first: int
    """The number of its first sample in the stream."""
    expected: ExpectedSamples
    missing: BoolArray
    """bool [S]: which samples were not delivered yet."""


class CheckedFeed:
    """Between a generator and the feed that it was given. The first thing that is wrong ends the stream; nothing is raised in
    the generator's own threads, where an error might be lost. Once it is closed, nothing reaches the feed: an engine that was
    given up may still deliver, when the feed already serves another stream, whose samples have the same numbers."""

    def __init__(
        self,
        feed: SampleFeed,
        require: Callable[[GenerateRequest], None],
        check: Callable[[ExpectedSamples, GenerateResult], None],
    ) -> None:
        """`require` raises where a request is not legal, `check` where samples are not what they were to be."""
        self._feed = feed
        self._require = require
        self._check = check
        self._lock = threading.RLock()
        """Held while samples are delivered, so that none are on their way once `close` returns."""
        self._taken: list[_Taken] = []
        """Ascending by number."""
        self._num_samples = 0
        self._has_ended = False
        self._is_closed = False
        self._error: BaseException | None = None

    def take(self, *, wait: bool) -> Sequence[GenerateRequest] | None:
        """Return the next requests of the generator; see SampleFeed."""
        try:
            requests = None if self._error is not None else self._feed.take(wait=wait)
        except BaseException as error:
            self._fail(error)
            raise
        if requests is None:
            self._has_ended = True
            return None
        with self._lock:
            try:
                for request in requests:
                    self._require(request)
                for request in requests:
                    self._expect(request)
            except RlcoreError as error:
                self._fail(error)
                return None
        return requests

    def deliver(self, samples: Int64Array, result: GenerateResult) -> None:
        """Pass on finished samples; see SampleFeed."""
        with self._lock:
            if self._is_closed or self._error is not None:
                return
            try:
                taken = self._claim(samples)
                if not isinstance(result, GenerateResult):
                    raise ContractError(f"found {type(result).__name__}; expected a GenerateResult")
                self._check(taken.expected.select(samples - taken.first), result)
            except ContractError as error:
                self._fail(ContractError(f"delivered what it must not: {error}"))
                return
            except BaseException as error:
                self._fail(error)
                return
            try:
                self._feed.deliver(samples, result)
            except BaseException as error:  # the generator's thread would lose it
                self._fail(error)

    def end(self) -> None:
        """End the stream."""
        with self._lock:
            if not self._is_closed:
                self._feed.end()

    def close(self) -> None:
        """Let nothing through any more. Returns once no sample is being delivered."""
        with self._lock:
            self._is_closed = True

    def finish(self) -> None:
        """Raise what was wrong; ContractError where samples were never delivered, or the generator did not wait for the end."""
        if self._error is not None:
            raise self._error
        if not self._has_ended:
            raise ContractError("returned before the feed had ended; expected it to go on until `take` returns None")
        if self._taken:
            number = self._taken[0].first + int(self._taken[0].missing.argmax())
            left = sum(int(one.missing.sum()) for one in self._taken)
            raise ContractError(f"returned without sample {number}, one of {left} never delivered; expected them as ABORTED")

    def _expect(self, request: GenerateRequest) -> None:
        num_samples = len(request.seeds)
        if num_samples:
            self._taken.append(_Taken(self._num_samples, ExpectedSamples.of(request), np.ones(num_samples, np.bool_)))
        self._num_samples += num_samples

    def _claim(self, samples: Int64Array) -> _Taken:
        """The request of some samples, which are delivered now."""
        check_array("samples", samples, np.int64)
        if not len(samples):
            raise ContractError("found no samples; expected at least one")
        position = bisect_right(self._taken, int(samples[0]), key=lambda one: one.first) - 1
        taken = self._taken[position] if position >= 0 else None
        if taken is None or samples.min() < taken.first or samples.max() >= taken.first + len(taken.missing):
            raise ContractError(f"found samples {samples[:8].tolist()}; expected those of one request, not delivered before")
        positions = samples - taken.first
        if len(np.unique(positions)) < len(positions) or not taken.missing[positions].all():
            raise ContractError(f"found samples {samples[:8].tolist()}, one of them for the second time")
        taken.missing[positions] = False
        if not taken.missing.any():
            del self._taken[position]
        return taken

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
        self._feed.end()
