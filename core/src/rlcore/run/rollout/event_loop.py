"""An asyncio event loop in a daemon thread, which can be given up when the code it runs never returns."""

import asyncio
import ctypes
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

CLOSE_S = 2.0
"""Most seconds to wait for the thread to end."""
POLITE_S = 0.2
"""Seconds in which a loop that still turns stops by itself."""


class Abandoned(BaseException):
    """Raised inside the thread's code to make it end; no `except Exception` holds it up."""


class _DaemonExecutor(ThreadPoolExecutor):
    """The executor of `asyncio.to_thread`, with a daemon thread for each call, so that one which hangs takes no place from
    others and does not keep the process from ending."""

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
    """A thread that runs an event loop."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop.set_default_executor(_DaemonExecutor())
        self._interrupted = threading.Event()
        self._stopping = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="environment-loop")
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, None]) -> Future[None]:
        """Start a coroutine on the loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def ends(self, future: Future[None], timeout_s: float) -> bool:
        """Whether a future is done within the time. KeyboardInterrupt where code on the loop has raised it, also in a task that
        no one waits for."""
        done = bool(wait([future], timeout=timeout_s).done)
        if self._interrupted.is_set():
            self._interrupted.clear()
            raise KeyboardInterrupt
        return done

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
        self._stop()
        self._thread.join(CLOSE_S)

    def abandon(self) -> None:
        """End a thread that is stuck in Python code, by the only means that CPython has for it: left running, it would take a
        core and the interpreter's lock from the rest of the run. One that is stuck in a system call stays behind, asleep."""
        self.loop.set_exception_handler(lambda *_: None)  # what becomes of the tasks left behind is no news
        self._stop()
        if not self._stopped.wait(POLITE_S):
            thread = ctypes.c_ulong(self._thread.ident or 0)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(Abandoned))

    def _stop(self) -> None:
        self._stopping = True
        self.loop.call_soon_threadsafe(self.loop.stop)

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn()
            self._stopped.set()
            self._finish()
        except (Abandoned, KeyboardInterrupt, SystemExit):
            pass
        finally:
            self.loop.close()

    def _turn(self) -> None:
        """Until the loop stops. asyncio keeps these two errors for whoever waits for their task, and lets them out of the loop
        as well, where they would end the thread with all that is on it."""
        try:
            self.loop.run_forever()
        except KeyboardInterrupt:
            self._interrupted.set()
        except SystemExit:
            pass

    def _finish(self) -> None:
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self.loop.run_until_complete(asyncio.wait(tasks, timeout=CLOSE_S / 2))
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
