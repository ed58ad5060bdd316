"""A stream over all generators of a pool."""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

from attrs import evolve

from rlcore.execution import not_begun
from rlcore.spi import WorkerError
from rlcore.spi.execution import ResponseFeed
from rlcore_ray.calls import COLLECT, Calls, PoolLostError
from rlcore_ray.engines import Engines
from rlcore_ray.request_router import RequestRouter
from rlcore_ray.suspend_aware_clock import suspend_aware_time
from rlcore_ray.worker_stream import Collected, NumberedRequest

WATCH_S = 1.0
"""Least seconds between two looks at the ranks that take no part in a stream, those of other pools among them."""
WATCH_EACH_S = 0.02
"""Seconds for each of them, where there are many: a look costs the driver about a hundredth of that."""


class PoolStream:
    """Sends requests of a feed to the hosts, and moves those of a failed engine to the others. A thread for each host collects
    its samples; one more watches the ranks without a part in the stream, of this pool and of those `beside` it."""

    def __init__(
        self, engines: Engines, feed: ResponseFeed, beside: Sequence[Calls] = (), *, watches_others: bool = True
    ) -> None:
        """`watches_others` is False where another stream of the pool watches over the ranks without a part in any."""
        self._calls = engines.calls
        self._beside = beside
        self._watches_others = watches_others
        self._engines = engines
        self._hosts = engines.members
        self._feed = feed
        self._router = RequestRouter(len(self._hosts))
        self._changing = threading.Lock()
        """Held while a host leaves or joins, and while the end begins: nothing is dealt behind that."""
        self._is_ending = threading.Event()
        self._threads: list[threading.Thread] = []
        self._collecting: dict[int, threading.Thread] = {}
        """The thread that collects samples of each rank."""
        self._errors: list[BaseException] = []

    def run(self, weight_version: int) -> None:
        """Run until the feed ends and all samples have come back. WorkerError where a host dies, all engines have failed, or a
        host returns nothing for as long as a call may take; the other streams then end too."""
        with self._calls.streaming(len(self._engines.living)):
            try:
                with self._engines.streaming(self):
                    with self._changing:  # an engine that joins meanwhile begins by the one or the other
                        self._begin(self._engines.living, weight_version)
                    if self._watches_others:
                        self._start("standby", self._watch_others)
                    self._deal()
            except WorkerError as error:
                self._fail(error)
            finally:
                with self._changing:
                    self._is_ending.set()
                self._end()
                for thread in self._threads:
                    thread.join()
        if self._errors:
            raise min(self._errors, key=lambda error: isinstance(error, PoolLostError))

    def rejoin(self, rank: int, weight_version: int) -> None:
        """See Engines."""
        if (before := self._collecting.get(rank)) is not None and not self._takes_part(rank):
            before.join()  # it sends the requests of a process that is gone to the others
        with self._changing:
            if not self._is_ending.is_set():
                self._begin([rank], weight_version)

    def retire(self, rank: int) -> None:
        """See Engines."""
        with self._changing:
            self._router.retire(self._hosts.index(rank))

    def is_busy(self, rank: int) -> bool:
        """See Engines."""
        return self._router.is_busy(self._hosts.index(rank))

    def _takes_part(self, rank: int) -> bool:
        return self._router.has(self._hosts.index(rank))

    def _begin(self, ranks: Sequence[int], weight_version: int) -> None:
        if not ranks:
            raise WorkerError("stream: no engine holds weights: all have failed since the last refit")
        beginning = [rank for rank in ranks if not self._takes_part(rank)]
        for rank in self._engines.beside("stream_begin", dict.fromkeys(beginning, (weight_version,))):
            host = self._hosts.index(rank)
            self._router.join(host)
            self._collecting[rank] = self._start("collect", self._bring_back, host)

    def _start(self, name: str, target: Callable[..., None], *arguments: Any) -> threading.Thread:
        thread = threading.Thread(target=target, args=arguments, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread

    def _watch_others(self) -> None:
        """End the stream with the cause where a rank dies that takes no part in it: nothing else waits for that one."""
        try:
            others = self._others()
            while not self._is_ending.wait(max(WATCH_S, WATCH_EACH_S * sum(len(ranks) for _, ranks in others))):
                others = self._others()
                for calls, ranks in others:
                    calls.beside("stream_standby", dict.fromkeys(ranks, ()))
        except BaseException as error:  # nobody sees what a thread raises
            self._fail(error)

    def _others(self) -> list[tuple[Calls, Sequence[int]]]:
        """The ranks that take no part, by their pools."""
        idle = sorted(set(range(len(self._calls.workers))).difference(self._engines.living))
        found = [(self._calls, idle), *((calls, range(len(calls.workers))) for calls in self._beside)]
        return [(calls, ranks) for calls, ranks in found if ranks]

    def _deal(self) -> None:
        while (requests := self._feed.take(wait=True)) is not None:
            with self._changing:  # what is dealt to a host that leaves is to be with it, or with the others
                self._add(self._router.dispatch(request) for request in requests)

    def _add(self, dealt: Iterable[Mapping[int, NumberedRequest]]) -> None:
        by_rank: dict[int, list[NumberedRequest]] = defaultdict(list)
        for parts in dealt:
            for host, numbered in parts.items():
                by_rank[self._hosts[host]].append(numbered)
        if by_rank:
            self._engines.send("stream_add", {rank: (numbered,) for rank, numbered in by_rank.items()})

    def _bring_back(self, host: int) -> None:
        """Collect the samples of a host until its stream has ended."""
        try:
            try:
                error = self._collect(host)
            except WorkerError as failure:
                if self._hosts[host] not in self._engines.slots:
                    raise
                error = failure
            if error is not None:
                self._give_way(host, error)
        except BaseException as error:  # which would be lost in this thread
            self._fail(error)

    def _collect(self, host: int) -> BaseException | None:
        """Return what the host's generator raised. Errors of the driver's own are raised: no engine is to blame for them."""
        rank, since = self._hosts[host], suspend_aware_time()
        while True:
            collected: Collected | BaseException = self._engines.outcome_beside("stream_collect", rank, COLLECT)
            if isinstance(collected, BaseException):
                return collected
            for samples, responses in collected.parts:
                # A copy of its arrays, or an answer would stay in Ray's store as long as anyone keeps a sample of it.
                self._feed.deliver(samples, evolve(responses, result=deepcopy(responses.result)))
                self._router.done(host, samples)
            if collected.has_ended:
                self._require_ending(rank)
                return None
            if collected.parts or not (self._router.is_busy(host) or self._is_ending.is_set()):
                since = suspend_aware_time()
            self._engines.require_progress("stream", rank, since)

    def _give_way(self, host: int, error: BaseException) -> None:
        """Deal what a host has not brought back to the others, where they can go on; else its error is the stream's."""
        if not self._engines.outlive(error, self._hosts[host]):
            raise error
        with self._changing:
            owed = self._router.leave(host)
            if not self._engines.take_out(self._hosts[host]):
                self._fail(error)  # before what is dealt next finds no host
                return
            num_samples = sum(len(numbers) for numbers, _ in owed)
            self._engines.go_on(self._hosts[host], error, f"{num_samples} samples are dealt to the others")
            if self._is_ending.is_set():
                for numbers, _ in owed:
                    self._feed.deliver(numbers, not_begun(len(numbers)))
            else:
                self._add(self._router.dispatch(request, numbers) for numbers, request in owed)

    def _require_ending(self, rank: int) -> None:
        if not self._is_ending.is_set():
            raise PoolLostError(f"stream: {self._engines.worker(rank)} was closed before the stream had ended")

    def _end(self) -> None:
        try:
            self._engines.beside("stream_end", dict.fromkeys({*self._engines.hosts, *self._collecting}, ()))
        except WorkerError as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._errors.append(error)
        self._feed.end()
