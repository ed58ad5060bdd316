"""A stream's requests on several engines: dealt out as they come, and handed on as they end."""

import threading
from collections.abc import Sequence
from concurrent.futures import Future, wait
from functools import partial

import numpy as np

from rlcore.spi import GenerateRequest, SampleFeed
from rlcore.spi.arrays import Int64Array
from rlcore_torchkit.generation import FinishedSample
from rlcore_vllm.engines.routing import require_experts
from rlcore_vllm.engines.sampling import Samples, joined
from rlcore_vllm.replicas.readers import cut_when_cancelled, hand_to_reader
from rlcore_vllm.replicas.replica import Replica
from rlcore_vllm.replicas.request_dispatch import dispatch, work_of

MAX_CONVERSATIONS = 2**17
"""Conversations that a stream remembers the engine of."""


class Stream:
    """The requests of one stream."""

    def __init__(self, replicas: Sequence[Replica], feed: SampleFeed) -> None:
        self._replicas = replicas
        self._feed = feed
        self._num_samples = 0
        self._lock = threading.Lock()
        self._busy = [0] * len(replicas)
        """Tokens that each engine may still come to."""
        self._placement: dict[int, int] = {}
        self.calls: dict[Future[None], int] = {}
        """Calls under way, and those that failed, with the number of their engine."""
        self._error: BaseException | None = None

    def add(self, request: GenerateRequest, limits: Int64Array, adapter: int = 0) -> None:
        """Let a request join, each sample on the engine with the least to do; `limits` int64 [S]: tokens of each. `adapter` is
        the engines' number of its adapter."""
        first, self._num_samples = self._num_samples, self._num_samples + len(limits)
        work = work_of(request, limits)
        with self._lock:
            parts = dispatch(request, limits, self._busy, self._placement, adapter=adapter)
            for engine, part in enumerate(parts):
                self._busy[engine] += int(work[part.numbers].sum())
                self._remember(request, part, engine)
        for engine, part in enumerate(parts):
            if len(part.numbers):
                replica = self._replicas[engine]
                call = replica.generate(
                    part, partial(self._deliver, request, first, work, engine), partial(hand_to_reader, request)
                )
                with self._lock:
                    self.calls[call] = engine
                call.add_done_callback(self._end)
                cut_when_cancelled(request, part, replica, call)

    def _remember(self, request: GenerateRequest, part: Samples, engine: int) -> None:
        """The engine that conversations are on, the oldest first."""
        if request.conversations is None or len(self._replicas) == 1:
            return
        for conversation in request.conversations[part.numbers].tolist():
            self._placement.pop(conversation, None)
            self._placement[conversation] = engine
        self._placement.pop(-1, None)
        while len(self._placement) > MAX_CONVERSATIONS:
            del self._placement[next(iter(self._placement))]

    def cut(self) -> None:
        """End what is under way; returns once all is delivered. Raises what a call raised."""
        with self._lock:
            calls = dict(self.calls)
        for engine, replica in enumerate(self._replicas):
            if cut := [call for call, place in calls.items() if place == engine and not call.done()]:
                replica.cut(cut)
        for call in wait(calls).done:
            call.result()
        if self._error is not None:
            raise self._error

    def _deliver(
        self, request: GenerateRequest, first: int, work: Int64Array, engine: int, finished: Sequence[FinishedSample]
    ) -> None:
        try:
            numbers = np.array(sorted(sample.number for sample in finished))
            with self._lock:
                self._busy[engine] -= int(work[numbers].sum())
            require_experts(finished)
            self._feed.deliver(first + numbers, joined(finished, request))
        except BaseException as error:  # raised where the stream is, and not in an engine's thread
            self._error = self._error or error
            self._feed.end()

    def _end(self, call: Future[None]) -> None:
        """Forget a call that is over; one that failed ends the stream."""
        if call.cancelled() or call.exception() is None:
            with self._lock:
                self.calls.pop(call, None)
        else:
            self._feed.end()
