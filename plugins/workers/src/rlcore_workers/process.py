"""A process of a WorkerPool: `python -m rlcore_workers.process FD TASK`, over a connection of multiprocessing.

The process itself never computes: a child that it forks does. What takes too long, crashes or is killed costs that child, and a
fork, while everything that `Task.prepare` has imported is there already.
"""

import contextlib
import gc
import os
import pickle
import resource
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection, Pipe, wait
from pkgutil import resolve_name
from typing import Any

from attrs import field, frozen

from rlcore_workers.descendants import adopt_orphans, end_descendants

MAX_KILLS = 3
"""Most new children for a request whose child was killed from outside: the request is not the cause."""


@frozen(kw_only=True)
class Limits:
    """Limits of a child; None is no limit."""

    cpu_time_s: float | None = None
    """Seconds of processor time for one request, so that the answer does not depend on what else runs on the machine. What ends
    it is the alarm's default action, which needs no help from Python."""
    max_memory_bytes: int | None = None
    costly_s: float | None = None
    """A child that has used so much processor time on one request ends with it: what that left in its memory is no burden to
    the next."""
    max_requests: int | None = None
    """Requests that one child answers."""


@frozen(kw_only=True)
class Task:
    """The work of a pool's processes. All its fields are picklable."""

    name: str
    """The name in messages and in the list of processes."""
    handle: str
    """"module:function", called in the child as function(argument, request)."""
    argument: Any = None
    prepare: str | None = None
    """"module:function", called without arguments before any child is forked, for what all of them share."""
    limits: Limits = field(factory=Limits)
    pass_environment: tuple[str, ...] = ()
    """Environment variables that the processes get besides those of `child_environment`."""
    shows_output: bool = False
    """True where output goes to this process's standard error; else it is discarded."""
    is_tried_once: bool = False
    """True where a request that ended a process goes to no other one, since it may not run twice."""
    leaves_signals: bool = False
    """True where the process ignores SIGTERM and SIGHUP, which stop a whole job: the programs of its requests, and the caller,
    handle them. On Linux all its descendants end with it in any case, in other sessions too."""


@frozen
class Ended:
    """Replaces the answer of a request that ended its process."""

    exit_code: int
    """Negative: the number of the signal."""


@frozen
class NotStarted:
    """The first message of a process that cannot work, in place of None."""

    traceback: str


class Child:
    """A process that answers one request after another, until it ends over one."""

    def __init__(self, task: Task) -> None:
        self._connection, theirs = Pipe()
        self._process = os.fork()
        if self._process == 0:
            status = 1
            try:
                _close_others(theirs.fileno())
                _serve(theirs, task)
                status = 0
            except EOFError:  # nobody asks any more
                status = 0
            finally:
                os._exit(status)
        theirs.close()

    def ask(self, request: bytes, caller: Connection | None = None) -> bytes | None:
        """The pickled answer to a pickled request; None where the child has ended. EOFError where the caller has, which sends
        nothing meanwhile."""
        with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
            self._connection.send_bytes(request)
            if caller is not None and self._connection not in wait([self._connection, caller]):
                raise _CallerIsGone
            return self._connection.recv_bytes()
        return None

    def ended_by(self) -> int:
        """Wait for its end: the signal's number, negative, or the exit code."""
        self._connection.close()
        return os.waitstatus_to_exitcode(os.waitpid(self._process, 0)[1])


class _CallerIsGone(Exception):
    """Nobody waits for the answer."""


def ending(exit_code: int) -> str:
    """Return the end of a process in words. A negative code is the number of a signal."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    named = {number.value: number.name for number in signal.Signals}
    return f"signal {named.get(-exit_code, -exit_code)}"


def main(arguments: Sequence[str]) -> None:
    """Answer until the connection ends, then end every process of the group."""
    gone = contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError, _CallerIsGone)
    adopt_orphans()
    with gone:
        _answer_all(Connection(int(arguments[0])))
    end_descendants(os.getpid())
    os.killpg(0, signal.SIGKILL)  # what a request started must not outlive this process, which leads a session of its own


def ask_child(request: bytes, child: Child | None, task: Task, caller: Connection | None = None) -> tuple[bytes, Child | None]:
    """The answer, and the child where it can go on."""
    ended = 0
    for _ in range(MAX_KILLS + 1):
        child = child or Child(task)
        if (answer := child.ask(request, caller)) is not None:
            return answer, child
        ended, child = child.ended_by(), None
        if task.is_tried_once or ended not in (0, -signal.SIGKILL):  # 0: it had ended by itself after the request before
            break
    return pickle.dumps(Ended(ended)), None


def _answer_all(caller: Connection) -> None:
    try:
        task: Task = caller.recv()
        if task.leaves_signals:
            for number in (signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, lambda *_: None)  # no SIG_IGN, which programs would inherit
        os.dup2(2 if task.shows_output else os.open(os.devnull, os.O_WRONLY), 1)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a child ends without flushing
        if task.prepare is not None:
            resolve_name(task.prepare)()
            gc.collect()
            gc.freeze()  # the children share what is never looked at again
    except EOFError:
        raise
    except Exception:
        caller.send(NotStarted(traceback.format_exc()))
        return
    caller.send(None)
    child = None
    while True:
        answer, child = ask_child(caller.recv_bytes(), child, task, caller)
        caller.send_bytes(answer)


def _close_others(kept: int) -> None:
    """Close the parent's descriptors, so that this child and the run see the end of the connection when the parent exits."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.closerange(3, kept)
    os.closerange(kept + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def _serve(caller: Connection, task: Task) -> None:
    limits, handle = task.limits, resolve_name(task.handle)
    with contextlib.suppress(ValueError, OSError):  # not every system can limit it
        if limits.max_memory_bytes is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (limits.max_memory_bytes, limits.max_memory_bytes))
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a request caused the crash: write no core dump
    num_answered = 0
    while limits.max_requests is None or num_answered < limits.max_requests:
        request = caller.recv()
        start = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, limits.cpu_time_s or 0.0)
        answer = handle(task.argument, request)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        caller.send(answer)
        num_answered += 1
        if limits.costly_s is not None and time.process_time() - start > limits.costly_s:
            return


if __name__ == "__main__":
    from rlcore_workers import process

    process.main(sys.argv[1:])  # the module that pickles name, in place of `__main__`
