"""Limits on the time and memory that foreign code takes before and beside a run: imports, chat templates, tokenizers."""

import ctypes
import os
import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from traceback import walk_tb
from types import FrameType, TracebackType

LOAD_VARIABLE = "RLCORE_LOAD_TIMEOUT_S"
"""Environment variable with another number of seconds than LOAD_S."""
LOAD_S = 60.0
"""Seconds in which what a plugin, a recipe or a model names has to be loaded."""
TEMPLATE_S = 10.0
"""Seconds in which a chat template has to render messages."""
NOTICE_S = 10.0
"""Seconds after which it is said what takes long."""
LOOK_S = 0.05
"""Seconds between two looks at the memory."""
_SOON_S = 1e-3
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
AGAIN_S = 1.0
"""Seconds after which code that holds up what ends it is ended again."""


class LateError(TimeoutError):
    """Something took longer, or more memory, than it may. The message names it, and where it was."""


class _Late(BaseException):
    """Raised inside the code that is late, so that no `except Exception` holds it up."""


def load_seconds() -> float:
    """Return the limit on loading one thing."""
    try:
        return min(max(1.0, float(os.environ[LOAD_VARIABLE])), 1e6)
    except (KeyError, ValueError):
        return LOAD_S


@contextmanager
def loading(what: str, times: float = 1.0) -> Iterator[None]:
    """Limit the loading of `what`, which messages name, to the usual seconds `times` a number."""
    with time_limit(what, load_seconds() * times, f"the environment variable {LOAD_VARIABLE} sets another limit"):
        yield


@contextmanager
def time_limit(what: str, seconds: float, remedy: str = "", *, max_bytes: int | None = None) -> Iterator[None]:
    """Run the block for at most so many seconds, and until the process has taken `max_bytes` more of memory. LateError names
    `what` and the line that it was at.

    In the main thread a signal ends what waits, too; in others, Python code alone can be ended.
    """
    is_main = threading.current_thread() is threading.main_thread()
    alarm = (SignalAlarm if is_main else ThreadAlarm)(what, seconds, max_bytes)
    place = ""
    try:
        try:
            alarm.set()
            yield
        finally:
            alarm.clear()
    except BaseException as error:
        alarm.clear()  # Ctrl-C may have come in the midst of it
        if not isinstance(error, _Late) or not alarm.fault:
            raise  # another block's, around this one, or the code's own
        place = _place(error.__traceback__)
    if alarm.fault:
        reason = f"{what} took {alarm.fault}{place}"
        raise LateError(f"{reason}; {remedy}" if remedy else reason)


class _Alarm(ABC):
    """Rings in the thread that has set it, unless it is cleared in time."""

    def __init__(self, what: str, seconds: float, max_bytes: int | None) -> None:
        self.what, self.seconds = what, seconds
        self.fault = ""
        """What the block took too much of; empty until the alarm has rung."""
        self.is_set = False
        self._max_bytes = inf if max_bytes is None else resident_bytes() + max_bytes
        self._ends = time.monotonic() + seconds
        self._memory_fault = f"more than {max_bytes or 0:,} bytes of memory"

    @abstractmethod
    def set(self) -> None:
        """Begin to count."""

    @abstractmethod
    def clear(self) -> None:
        """Ring no more."""

    def _next_look(self) -> float:
        """Seconds until there may be a fault."""
        remaining = self._ends - time.monotonic()
        return max(remaining if self._max_bytes == inf else min(remaining, LOOK_S), _SOON_S)

    def _found(self) -> str:
        """What the block has taken too much of; empty where that is nothing."""
        if time.monotonic() >= self._ends:
            return f"longer than {self.seconds:g} s"
        return self._memory_fault if self._max_bytes < inf and resident_bytes() > self._max_bytes else ""


class SignalAlarm(_Alarm):
    """Rings by SIGALRM. Whoever had set that signal before gets it at its time."""

    def set(self) -> None:
        """See _Alarm."""
        self._outer = signal.getsignal(signal.SIGALRM) or signal.SIG_DFL
        self._outer_ends = inf
        self.is_set = True
        signal.signal(signal.SIGALRM, self._due)
        remaining, _ = signal.setitimer(signal.ITIMER_REAL, 0.0)
        now = time.monotonic()
        self._outer_ends = now + remaining if remaining else inf
        self._told = now + NOTICE_S
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
        due = min(self._told, self._outer_ends) - time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, max(min(due, self._next_look()), _SOON_S))

    def _due(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if now >= self._outer_ends and callable(self._outer):
            self._outer_ends = inf
            self._wait()
            self._outer(number, frame)
        elif found := self._found():
            self.fault = self.fault or found
            self._max_bytes, self._ends = inf, now + AGAIN_S  # for code that holds it up
            self._wait()
            raise _Late
        else:
            if now >= self._told:
                self._told = inf
                print(f"rlcore: {self.what} takes long; {self.seconds:g} s is the limit", file=sys.stderr, flush=True)
            self._wait()


class ThreadAlarm(_Alarm):
    """Raises in a thread from another one, as soon as it executes Python code."""

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
        if self.fault:  # what was raised and has not come yet is not to come later
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
    """Return the memory that the process has of the machine's; 0 where the system does not say."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE_BYTES
    except OSError:  # no Linux
        return 0


def _place(trace: TracebackType | None) -> str:
    """The innermost module and line of foreign code, as " (in module, line 3)"."""
    frames = [(str(frame.f_globals.get("__name__", "?")), line) for frame, line in walk_tb(trace)]
    found = [(name, line) for name, line in frames if name not in (__name__, "contextlib") and not name.startswith("importlib")]
    return f" (in {found[-1][0]}, line {found[-1][1]})" if found else ""
