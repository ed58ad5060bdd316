"""Limit the time and memory of code that is not rlcore's own: imports of plugins, chat templates, tokenizers."""

import ctypes
import os
import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import _GeneratorContextManager, contextmanager
from math import inf
from traceback import walk_tb
from types import FrameType, TracebackType

LOAD_VARIABLE = "RLCORE_LOAD_TIMEOUT_S"
"""Environment variable that replaces LOAD_S."""
LOAD_S = 60.0
"""Most seconds for loading code or a file that a plugin, a recipe or a model names."""
TEMPLATE_S = 10.0
"""Most seconds for rendering one conversation with a chat template."""
NOTICE_S = 10.0
"""Seconds after which a line on stderr names the slow code."""
LOOK_S = 0.05
"""Seconds between two measurements of memory."""
_SOON_S = 1e-3
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_END_OF_BLOCK = _GeneratorContextManager.__exit__.__code__
"""Code that runs once a block has ended, and that no `try` of a generator surrounds."""
AGAIN_S = 1.0
"""Seconds after which the exception is raised again in code that caught it."""


class LateError(TimeoutError):
    """Error for code that exceeded its limit of time or memory. The message names the code and the line that it was at."""


class FalseInterruptError(RuntimeError):
    """Error in place of a KeyboardInterrupt that code raised, and neither Ctrl-C nor SIGTERM. The message names its line."""


class _Late(BaseException):
    """Exception raised inside code that exceeds its limit: a BaseException, which `except Exception` does not catch."""


def load_seconds() -> float:
    """Return the seconds that one import or load may take."""
    try:
        return min(max(1.0, float(os.environ[LOAD_VARIABLE])), 1e6)
    except (KeyError, ValueError):
        return LOAD_S


@contextmanager
def loading(what: str, times: float = 1.0) -> Iterator[None]:
    """Limit the block, which loads `what`, to `times` the usual seconds. Messages name `what`."""
    with time_limit(what, load_seconds() * times, f"the environment variable {LOAD_VARIABLE} sets another limit"):
        yield


@contextmanager
def time_limit(what: str, seconds: float, remedy: str = "", *, max_bytes: int | None = None) -> Iterator[None]:
    """Limit the block to so many seconds, and to `max_bytes` of further memory of the process. LateError names `what` and the
    line that it was at. FalseInterruptError in place of a KeyboardInterrupt without a signal.

    In the main thread a signal ends code that blocks, too. In other threads only Python code can be ended.
    """
    is_main = threading.current_thread() is threading.main_thread()
    alarm = (SignalAlarm if is_main else ThreadAlarm)(what, seconds, max_bytes)
    place = ""
    try:
        try:
            alarm.set()
            with _true_interrupts(what, is_main):
                yield
        finally:
            alarm.clear()
    except BaseException as error:
        alarm.clear()  # Ctrl-C may have interrupted the first call
        if not isinstance(error, _Late) or not alarm.fault:
            raise  # the exception of an outer time_limit, or of the code itself
        place = _place(error.__traceback__)
    if alarm.fault:
        reason = f"{what} took {alarm.fault}{place}"
        raise LateError(f"{reason}; {remedy}" if remedy else reason)


@contextmanager
def _true_interrupts(what: str, is_main: bool) -> Iterator[None]:
    """Let KeyboardInterrupt leave the block only where a signal arrived, which Python handles in the main thread alone.

    Code that takes a signal over and gives it back has to raise it again.
    """
    arrived: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        arrived.append(number)
        handlers[number](number, frame)

    watched = {int(number): signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM) if is_main}
    handlers = {number: handler for number, handler in watched.items() if callable(handler)}

    def restore() -> None:
        for number, handler in handlers.items():
            if signal.getsignal(number) is note:
                signal.signal(number, handler)

    was_replaced = is_inside = False
    try:
        try:
            for number in handlers:
                signal.signal(number, note)
            is_inside = True
            yield
            is_inside = False
        finally:
            was_replaced = any(signal.getsignal(number) is not note for number in handlers)
            restore()
    except BaseException as error:
        restore()  # Ctrl-C may have interrupted the first call
        # Outside the block nothing of it runs; a handler of its own raises where it has replaced ours.
        if not isinstance(error, KeyboardInterrupt) or arrived or was_replaced or not is_inside:
            raise
        raise FalseInterruptError(f"{what} raised KeyboardInterrupt without Ctrl-C{_place(error.__traceback__)}") from error


class _Alarm(ABC):
    """An alarm that raises _Late in the thread that has set it, unless it is cleared in time."""

    def __init__(self, what: str, seconds: float, max_bytes: int | None) -> None:
        self.what, self.seconds = what, seconds
        self.fault = ""
        """The exceeded limit, in words; empty until the alarm rings."""
        self.is_set = False
        self._max_bytes = inf if max_bytes is None else resident_bytes() + max_bytes
        self._ends = time.monotonic() + seconds
        self._memory_fault = f"more than {max_bytes or 0:,} bytes of memory"

    @abstractmethod
    def set(self) -> None:
        """Start the alarm."""

    @abstractmethod
    def clear(self) -> None:
        """Stop the alarm."""

    def _next_look(self) -> float:
        """Return the seconds until the limits have to be checked next."""
        remaining = self._ends - time.monotonic()
        return max(remaining if self._max_bytes == inf else min(remaining, LOOK_S), _SOON_S)

    def _found(self) -> str:
        """Return the limit that the block exceeds now, in words; empty where it exceeds none."""
        if time.monotonic() >= self._ends:
            return f"longer than {self.seconds:g} s"
        return self._memory_fault if self._max_bytes < inf and resident_bytes() > self._max_bytes else ""


class SignalAlarm(_Alarm):
    """An alarm by SIGALRM. An alarm that was set before this one still comes at its time."""

    def set(self) -> None:
        """See _Alarm."""
        self._outer = signal.getsignal(signal.SIGALRM) or signal.SIG_DFL
        self._outer_ends = inf
        self.is_set = True
        signal.signal(signal.SIGALRM, self._due)
        remaining, _ = signal.setitimer(signal.ITIMER_REAL, 0.0)
        now = time.monotonic()
        self._outer_ends = now + remaining if remaining else inf
        self._notice_due = now + NOTICE_S
        self._wait()

    def clear(self) -> None:
        """See _Alarm."""
        if not self.is_set:
            return
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, self._outer)
        if self._outer_ends < inf:
            signal.setitimer(signal.ITIMER_REAL, max(self._outer_ends - time.monotonic(), _SOON_S))
        self.is_set = False

    def _wait(self) -> None:
        due = min(self._notice_due, self._outer_ends) - time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, max(min(due, self._next_look()), _SOON_S))

    def _due(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if now >= self._outer_ends and callable(self._outer):
            self._outer_ends = inf
            self._wait()
            self._outer(number, frame)
        elif (found := self._found()) and (frame is None or frame.f_code is not _END_OF_BLOCK):
            self.fault = self.fault or found
            self._max_bytes, self._ends = inf, now + AGAIN_S  # in case the code catches the exception
            self._wait()
            raise _Late
        else:
            if now >= self._notice_due:
                self._notice_due = inf
                print(f"rlcore: {self.what} takes long; {self.seconds:g} s is the limit", file=sys.stderr, flush=True)
            self._wait()


class ThreadAlarm(_Alarm):
    """An alarm that another thread raises in this one, at its next line of Python code."""

    def set(self) -> None:
        """See _Alarm."""
        self._thread, self._changing, self._cleared = threading.get_ident(), threading.Lock(), threading.Event()
        self.is_set = True
        threading.Thread(target=self._watch, daemon=True, name="rlcore-time-limit").start()

    def clear(self) -> None:
        """See _Alarm."""
        if not self.is_set:
            return
        self._cleared.set()
        with self._changing:
            self.is_set = False
        if self.fault:  # cancel an exception that has not arrived yet
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), None)

    def _watch(self) -> None:
        while not self._cleared.wait(self._next_look()):
            if found := self._found():
                self._ring(found)
                return

    def _ring(self, fault: str) -> None:
        with self._changing:
            if self.is_set:
                self.fault = fault
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), ctypes.py_object(_Late))


def resident_bytes() -> int:
    """Return the process's resident memory; 0 on a system without /proc."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE_BYTES
    except OSError:  # no Linux
        return 0


def _place(trace: TracebackType | None) -> str:
    """Return the innermost module and line of the limited code, as " (in module, line 3)"."""
    frames = [(str(frame.f_globals.get("__name__", "?")), line) for frame, line in walk_tb(trace)]
    found = [(name, line) for name, line in frames if name not in (__name__, "contextlib") and not name.startswith("importlib")]
    return f" (in {found[-1][0]}, line {found[-1][1]})" if found else ""
