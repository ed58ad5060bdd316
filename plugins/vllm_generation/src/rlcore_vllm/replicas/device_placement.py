"""Tracks whether weights and KV caches of engines are on the device, including engines that are starting."""

import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress

from rlcore.spi import WorkerError
from rlcore_vllm.replicas.replica import Replica


class DevicePlacement:
    """On the device, at first. Engines that are there move at once, others as soon as they have started."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas
        self._lock = threading.Lock()
        """Held while engines move, and while one that has started begins to count among them."""
        self._weights = self._cache = True
        self._absent: set[int] = set()
        """Engines that are being started, or that did not start."""

    def move(self, *, weights: bool, cache: bool, discard_weights: bool) -> dict[int, Future[int]]:
        """Put weights and KV cache of all engines on the device, or take them off; returns the bytes that each engine there
        then holds."""
        with self._lock:
            self._weights, self._cache = weights, cache
            there = [engine for engine in range(len(self._replicas)) if engine not in self._absent]
            return self._moved(there, discard_weights)

    def leave(self, engines: Sequence[int]) -> None:
        """No move asks these engines for anything until they have started."""
        with self._lock:
            self._absent.update(engines)

    @contextmanager
    def starting(self, engines: Sequence[int], *, discard_weights: bool) -> Iterator[None]:
        """Engines start in the block and are then moved to where the others are; where it raises, those that have started
        are."""
        self.leave(engines)
        try:
            yield
        except BaseException:
            with self._lock, suppress(WorkerError):
                moves = self._moved(engines, discard_weights)
                # Some may have started: they take up the device as the others do, until all are started anew.
                self._absent.difference_update(engine for engine, move in moves.items() if move.exception() is None)
            raise
        with self._lock:
            moves = self._moved_back(engines, discard_weights)
            self._absent.difference_update(engines)
        for move in moves.values():
            move.result()

    def _moved_back(self, engines: Sequence[int], discard_weights: bool) -> dict[int, Future[int]]:
        return {} if self._weights and self._cache else self._moved(engines, discard_weights)

    def _moved(self, engines: Iterable[int], discard_weights: bool) -> dict[int, Future[int]]:
        moves = {
            engine: self._replicas[engine].set_residency(
                weights=self._weights, cache=self._cache, discard_weights=discard_weights
            )
            for engine in engines
        }
        wait(moves.values())
        return moves
