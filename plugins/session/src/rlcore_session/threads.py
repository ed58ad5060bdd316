"""The threads of a session: each executes calls one after another."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

ResultT = TypeVar("ResultT")


class CallThread:
    """One thread that executes calls in the order in which they come. Backends are bound to their thread: CUDA's device is."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name, initializer=self._begin)
        self._thread: threading.Thread | None = None
        self.is_closed = False
        """True after `close`."""

    def _begin(self) -> None:
        self._thread = threading.current_thread()

    @property
    def is_current(self) -> bool:
        """Return whether the caller is this thread."""
        return threading.current_thread() is self._thread

    def submit(self, call: Callable[[], ResultT]) -> "Future[ResultT]":
        """Return the future of a call behind those that came before."""
        return self._executor.submit(call)

    def run(self, call: Callable[[], ResultT]) -> ResultT:
        """Return the result of a call; within this thread at once."""
        return call() if self.is_current else self.submit(call).result()

    def close(self) -> None:
        """End the thread behind the calls that it has."""
        self.is_closed = True
        self._executor.shutdown(wait=not self.is_current)
