"""A stream over all generators of a pool."""

import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from copy import deepcopy

from rlcore.run.execution.ray.calls import COLLECT, Calls, PoolLostError
from rlcore.run.execution.ray.stream_dealer import StreamDealer
from rlcore.run.execution.ray.worker_stream import Collected, NumberedRequest
from rlcore.run.protocols import ResponseFeed
from rlcore.spi import WorkerError


class PoolStream:
    """Deals what a feed brings to the hosts, in the thread that runs it; a thread for each host brings back its samples."""

    def __init__(self, calls: Calls, hosts: Sequence[int], feed: ResponseFeed) -> None:
        """`hosts` are the ranks with a generator."""
        self._calls = calls
        self._hosts = hosts
        self._feed = feed
        self._dealer = StreamDealer(len(hosts))
        self._is_ending = threading.Event()
        self._errors: list[BaseException] = []

    def run(self, weight_version: int) -> None:
        """Run until the feed ends and all that was taken has come back. WorkerError where a host dies, or where
        none of its samples ends for as long as a call may take; the streams of the other hosts are ended too."""
        collectors: list[threading.Thread] = []
        with self._calls.streaming(len(self._hosts)):
            try:
                self._calls.beside("stream_begin", dict.fromkeys(self._hosts, (weight_version,)))
                for host in range(len(self._hosts)):
                    collectors.append(threading.Thread(target=self._bring_back, args=(host,), name="collect", daemon=True))
                    collectors[-1].start()
                self._deal()
            except WorkerError as error:
                self._fail(error)
            finally:
                self._is_ending.set()
                self._end()
                for collector in collectors:
                    collector.join()
        if self._errors:
            raise min(self._errors, key=lambda error: isinstance(error, PoolLostError))

    def _deal(self) -> None:
        while (requests := self._feed.take(wait=True)) is not None:
            dealt: dict[int, list[NumberedRequest]] = defaultdict(list)
            for request in requests:
                for host, numbered in self._dealer.deal(request).items():
                    dealt[self._hosts[host]].append(numbered)
            if dealt:
                self._calls.beside("stream_add", {rank: (numbered,) for rank, numbered in dealt.items()})

    def _bring_back(self, host: int) -> None:
        """Collect the samples of a host until its stream has ended."""
        rank, since = self._hosts[host], time.monotonic()
        try:
            while True:
                collected: Collected = self._calls.beside("stream_collect", {rank: ()}, COLLECT)[0]
                for samples, responses in collected.parts:
                    self._dealer.done(host, samples)
                    # A copy, or an answer would stay in Ray's store as long as anyone keeps a sample of it.
                    self._feed.deliver(samples, deepcopy(responses))
                if collected.has_ended:
                    self._require_ending(rank)
                    return
                if collected.parts or not (self._dealer.is_busy(host) or self._is_ending.is_set()):
                    since = time.monotonic()
                self._calls.require_progress("stream", rank, since)
        except BaseException as error:  # which would be lost in this thread
            self._fail(error)

    def _require_ending(self, rank: int) -> None:
        if not self._is_ending.is_set():
            raise WorkerError(f"stream: {self._calls.workers[rank]} was closed before the stream had ended")

    def _end(self) -> None:
        try:
            self._calls.beside("stream_end", dict.fromkeys(self._hosts, ()))
        except WorkerError as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._errors.append(error)
        self._feed.end()
