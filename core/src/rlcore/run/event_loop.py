"""An asyncio event loop in a daemon thread, which can be given up when the code it runs never returns."""

import asyncio
import ctypes
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

CLOSE_S = 2.0
"""Most seconds to wait for the thread to end."""
POLITE_S = 0.2
"""Seconds in which a loop that still turns stops by itself."""


class _Abandoned(BaseException):
    """Raised inside the thread's code to make it end; no `except Exception` holds it up."""


class _DaemonExecutor(ThreadPoolExecutor):
    """For `asyncio.to_thread`: a daemon thread a call, so that one which hangs takes no place from others and does not keep
    the process from ending."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(fn(*args, **kwargs))
                except BaseException as error:
                    future.set_exception(error)

        threading.Thread(target=run, daemon=True, name="environment-call").start()
        return future


class LoopThread:
    """A running event loop."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop.set_default_executor(_DaemonExecutor())
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="environment-loop")
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, None]) -> Future[None]:
        """Start a coroutine on the loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def where(self) -> str:
        """The line that the thread is executing."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        if frame is None:
            return "at an unknown line"
        last = traceback.extract_stack(frame)[-1]
        return f"at {last.filename}:{last.lineno} in {last.name}"

    def close(self) -> None:
        """Cancel what is still running and end the thread; one that does not end within CLOSE_S is left to the process."""
        if self.loop.is_closed():
            return
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(CLOSE_S)

    def abandon(self) -> None:
        """End a thread that is stuck in Python code. One that is stuck in a system call stays behind, asleep."""
        self.loop.set_exception_handler(lambda *_: None)  # what becomes of the tasks left behind is no news
        self.loop.call_soon_threadsafe(self.loop.stop)
        if not self._stopped.wait(POLITE_S):
            thread = ctypes.c_ulong(self._thread.ident or 0)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(_Abandoned))

    def _run(self) -> None:
        try:
            self.loop.run_forever()
            self._stopped.set()
            self._finish()
        except _Abandoned:
            pass
        finally:
            self.loop.close()

    def _finish(self) -> None:
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self.loop.run_until_complete(asyncio.wait(tasks, timeout=CLOSE_S / 2))
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
