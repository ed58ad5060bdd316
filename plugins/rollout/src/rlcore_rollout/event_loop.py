"""An asyncio event loop in a daemon thread, which can be given up when the code it runs never returns."""

import asyncio
import ctypes
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from typing import Any
from weakref import WeakSet

CLOSE_S = 2.0
"""Most seconds to wait for the thread to end."""
POLITE_S = 0.2
"""Seconds in which a loop that still turns stops by itself."""


class Abandoned(BaseException):
    """Raised inside the thread's code to make it end; no `except Exception` holds it up."""


class _StoppableThread(threading.Thread):
    """A daemon thread whose Python code can be ended from outside."""

    def __init__(self, function: Callable[[], None], name: str) -> None:
        super().__init__(daemon=True, name=name)
        self._function = function
        self._at_work = False
        self._changing = threading.Lock()

    def run(self) -> None:
        """See Thread."""
        with suppress(Abandoned):
            with self._changing:
                self._at_work = True
            try:
                self._function()
            finally:
                # Under the lock, since another thread gets this one's number once it has ended, and the error with it.
                with self._changing:
                    self._at_work = False

    def stop(self) -> None:
        """Raise Abandoned in it as soon as it executes Python code, if it is at work."""
        with self._changing:
            if self._at_work:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.ident or 0), ctypes.py_object(Abandoned))


class _Call:
    """A function in a daemon thread of its own."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._is_given_up = False
        self.future = _CallFuture(self)
        self.thread = _StoppableThread(self._run, "environment-call")

    def give_up(self) -> None:
        """Nobody waits for it any more: end it where it computes in Python. A thread that is in a system call or a library
        stays behind until that returns."""
        self._is_given_up = True
        self.thread.stop()

    def _run(self) -> None:
        if self._is_given_up or not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self._function()
        except BaseException as error:
            if not self._is_given_up:  # else its event loop may be closed
                self.future.set_exception(error)
        else:
            if not self._is_given_up:
                self.future.set_result(result)


class _CallFuture(Future[Any]):
    """The future that asyncio waits for, and cancels where a call's time is up."""

    def __init__(self, call: _Call) -> None:
        super().__init__()
        self._call = call

    def cancel(self) -> bool:
        """Cancel the call; one that runs is given up."""
        if not super().cancel() and not self.done():
            self._call.give_up()
        return self.cancelled()


class _DaemonExecutor(ThreadPoolExecutor):
    """The executor of `asyncio.to_thread`, with a daemon thread for each call, so that one which hangs takes no place from
    others and does not keep the process from ending."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: WeakSet[_Call] = WeakSet()
        self._changing = threading.Lock()
        """Held while calls are added or gone through: others may begin while these are given up in another thread."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        call = _Call(partial(fn, *args, **kwargs))
        with self._changing:
            self._calls.add(call)
        call.thread.start()
        return call.future

    def give_up(self) -> None:
        """Give up all calls that run."""
        with self._changing:
            calls = list(self._calls)
        for call in calls:
            if not call.future.done():
                call.give_up()


class LoopThread:
    """A thread that runs an event loop."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._executor = _DaemonExecutor()
        self.loop.set_default_executor(self._executor)
        self._interrupted = threading.Event()
        self._stopping = False
        self._stopped = threading.Event()
        self._thread = _StoppableThread(self._run, "environment-loop")
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, None]) -> Future[None]:
        """Start a coroutine on the loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def ends(self, future: Future[None], timeout_s: float) -> bool:
        """Return whether a future is done within the time. KeyboardInterrupt where code on the loop has raised it, also in a
        task that no one waits for."""
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
        self._executor.give_up()

    def abandon(self) -> None:
        """End a thread that is stuck in Python code, by the only means that CPython has for it: left running, it would take a
        core and the interpreter's lock from the rest of the run. One that is stuck in a system call stays behind, asleep."""
        self.loop.set_exception_handler(lambda *_: None)  # what becomes of the tasks left behind is no news
        self._executor.give_up()
        self._stop()
        if not self._stopped.wait(POLITE_S):
            self._thread.stop()

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
