"""`python -m rlcore_vllm.host`: an engine in a process of its own, which its parent calls through a multiprocessing manager."""

import itertools
import os
import pickle
import queue
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from multiprocessing.managers import BaseManager
from typing import Any

from attrs import frozen

from rlcore.spi import WorkerError
from rlcore.spi.errors import ProblemsError
from rlcore_vllm.sampling import FinishedSample, Samples
from rlcore_vllm.settings import EngineSettings

PARENT_POLL_S = 0.5


@frozen(kw_only=True)
class HostOrder:
    """What the parent sends to the standard input, pickled."""

    settings: EngineSettings
    address: str
    """Path of the socket to listen on; it exists once the engine is ready."""
    authkey: bytes
    parent: int
    """Its process id: the host ends when that process does."""


class HostManager(BaseManager):
    """Both ends of the connection; the host registers `host` with the object behind it."""


HostManager.register("host")


class Host:
    """The engine as the parent calls it. Each call has a thread of its own."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._engine = _start(settings)
        self._jobs: dict[int, tuple[queue.SimpleQueue[Sequence[FinishedSample]], Future[None]]] = {}
        self._numbers = itertools.count()

    def submit(self, samples: Samples) -> int:
        """Begin to sample; returns a number for `collect`."""
        number = next(self._numbers)
        finished: queue.SimpleQueue[Sequence[FinishedSample]] = queue.SimpleQueue()
        done = self._engine.generate(samples, finished.put)
        done.add_done_callback(lambda _: finished.put(()))
        self._jobs[number] = finished, done
        return number

    def collect(self, number: int, timeout_s: float) -> tuple[list[FinishedSample], bool]:
        """What ended since the last call, waiting for the first up to `timeout_s`, and whether that is all."""
        finished, done = self._jobs[number]
        samples: list[FinishedSample] = []
        try:
            samples += finished.get(timeout=timeout_s)
            while True:
                samples += finished.get_nowait()
        except queue.Empty:
            pass
        if not done.done() or not finished.empty():
            return samples, False
        del self._jobs[number]
        done.result()
        return samples, True

    def cancel(self, number: int) -> None:
        """Drop what has not ended; nothing more is collected."""
        self._jobs.pop(number)[1].cancel()

    def begin_update(self) -> None:
        self._engine.begin_update().result()

    def call_workers(self, method: str, kwargs: Mapping[str, Any]) -> list[Any]:
        try:
            return self._engine.call_workers(method, kwargs).result()
        except ProblemsError as error:
            # It cannot be pickled.
            raise WorkerError(str(error)) from error

    def end_update(self, weight_version: int) -> None:
        self._engine.end_update(weight_version).result()

    def set_residency(self, weights: bool, cache: bool, discard_weights: bool) -> int:
        return self._engine.set_residency(weights=weights, cache=cache, discard_weights=discard_weights).result()

    def restart(self) -> None:
        """Another engine in this process, which spares it the imports."""
        self._engine.close()
        self._jobs.clear()
        self._engine = _start(self._settings)

    def close(self) -> None:
        """Free the engine; the parent then ends the process."""
        self._engine.close()


def _start(settings: EngineSettings) -> Any:
    from rlcore_vllm.engine import Engine

    return Engine(settings)


def main() -> None:
    """Start the engine, then serve until the parent ends the process or ends itself."""
    order: HostOrder = pickle.load(sys.stdin.buffer)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(order.parent,), daemon=True).start()
    host = Host(order.settings)
    HostManager.register("host", callable=lambda: host, exposed=_exposed())
    HostManager(address=order.address, authkey=order.authkey).get_server().serve_forever()


def _exposed() -> list[str]:
    return [name for name in vars(Host) if not name.startswith("_")]


def _end_with(parent: int) -> None:
    """Kill this process and those that vLLM started in its group as soon as the parent is gone, however it ended."""
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_S)
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__mp_main__":
    # A rank of the engine has begun, which imports this module before it imports vLLM.
    from rlcore_vllm.versions import import_without_torchao

    import_without_torchao()
if __name__ == "__main__":
    main()
