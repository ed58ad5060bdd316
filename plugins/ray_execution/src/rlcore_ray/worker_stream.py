"""A stream of a worker's generator, in a thread of its own, as the driver feeds it."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
from attrs import frozen

from rlcore.execution import not_begun
from rlcore.spi import GenerateRequest
from rlcore.spi.arrays import Int64Array
from rlcore.spi.execution import ResponseFeed, Responses
from rlcore_ray.dispatch import join_responses

COLLECT_S = 1.0
"""Most seconds for an answer with nothing in it."""
GATHER_S = 0.05
"""Least seconds between answers, so that each brings many samples where many end: the driver pays by answers."""

NumberedRequest: TypeAlias = tuple[Int64Array, GenerateRequest]
"""A request, and the driver's numbers of its samples, int64 [S]."""


@frozen(kw_only=True, eq=False)
class Collected:
    """The responses of a stream since the last time."""

    parts: Sequence[tuple[Int64Array, Responses]]
    """Samples by the driver's numbers, int64 [M]; those that report their experts, or masks, apart from the
    others."""
    has_ended: bool
    """True where nothing more will come."""


class WorkerStream:
    """The feed of a stream, between the generator's threads and the worker's calls."""

    def __init__(self, run: Callable[[ResponseFeed, int], None], weight_version: int) -> None:
        """Begin: `run` generates what a feed brings, from a version on."""
        self._changed = threading.Condition()
        self._looked_at = threading.Event()
        """Set once the generator has looked for requests, or has failed before."""
        self._waiting: list[NumberedRequest] = []
        self._numbers: dict[int, int] = {}
        """The driver's numbers of what is under way, by those of this stream."""
        self._num_taken = 0
        self._ended: list[tuple[Int64Array, Responses]] = []
        self._is_to_end = False
        self._has_ended = False
        self._error: BaseException | None = None
        self._last_answer = 0.0
        self._thread = threading.Thread(target=self._run, args=(run, weight_version), name="stream", daemon=True)
        self._thread.start()
        self._looked_at.wait(COLLECT_S)  # a refit may be the next call

    @property
    def thread(self) -> int | None:
        """The thread's identifier; None once the stream has ended."""
        return None if self._has_ended else self._thread.ident

    def add(self, requests: Sequence[NumberedRequest]) -> None:
        """Generate more."""
        with self._changed:
            self._waiting += requests
            self._changed.notify_all()

    def collect(self) -> Collected:
        """Return what has ended since the last time, once there is something or a second has passed. Raises what the generator
        has raised, after all that it had handed out before."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._has_ended, COLLECT_S)
            self._changed.wait_for(lambda: self._has_ended, self._last_answer + GATHER_S - time.monotonic())
            self._last_answer = time.monotonic()
            ended, self._ended, has_ended = self._ended, [], self._has_ended
            if self._error is not None and not ended:
                raise self._error
            has_ended = has_ended and self._error is None
        by_kind: dict[tuple[bool, bool], list[tuple[Int64Array, Responses]]] = {}
        for part in ended:
            result = part[1].result
            by_kind.setdefault((result.routed_experts is not None, result.sampling_mask is not None), []).append(part)
        return Collected(parts=[_joined(parts) for parts in by_kind.values()], has_ended=has_ended)

    def end(self) -> None:
        """End the stream: what has not ended is handed out as it is."""
        with self._changed:
            self._is_to_end = True
            self._changed.notify_all()

    def join(self) -> None:
        """Wait for its end."""
        self._thread.join()

    def take(self, *, wait: bool) -> Sequence[GenerateRequest] | None:
        """See rlcore.spi.execution.ResponseFeed."""
        self._looked_at.set()
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_to_end or not wait)
            if self._is_to_end:
                return None
            taken, self._waiting = self._waiting, []
            for numbers, _ in taken:
                self._numbers |= dict(enumerate(numbers.tolist(), self._num_taken))
                self._num_taken += len(numbers)
            return [request for _, request in taken]

    def deliver(self, samples: Int64Array, responses: Responses) -> None:
        """See rlcore.spi.execution.ResponseFeed."""
        with self._changed:
            numbers = np.array([self._numbers.pop(sample) for sample in samples.tolist()], np.int64)
            self._ended.append((numbers, responses))
            self._changed.notify_all()

    def _run(self, run: Callable[[ResponseFeed, int], None], weight_version: int) -> None:
        error: BaseException | None = None
        try:
            run(self, weight_version)
        except BaseException as raised:  # a panic in a native library is no Exception
            error = raised
        self._looked_at.set()
        with self._changed:
            if error is None:
                self._ended += [(numbers, not_begun(len(numbers))) for numbers, _ in self._waiting]
            self._error, self._has_ended = error, True
            self._changed.notify_all()


def _joined(parts: Sequence[tuple[Int64Array, Responses]]) -> tuple[Int64Array, Responses]:
    """Many small results as columns: the driver's share is by answers then, not by samples."""
    numbers = [samples for samples, _ in parts]
    return np.sort(np.concatenate(numbers)), join_responses(numbers, 1, [responses for _, responses in parts])
