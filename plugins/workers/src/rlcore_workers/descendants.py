"""Find and kill all descendants of a process, through their parents in /proc. Sessions of their own hide none of them.

The file is a script, too: `python -I -S descendants.py PARENT COMMAND...` runs a program under a supervisor. The supervisor
kills all descendants of the program as soon as the program or the supervisor's own parent ends. With `--guard MARK` in place of
a command it starts none: once its parent ends, it kills what still has the mark in its environment, such as a program that has
killed its supervisors. The script has no access to installed packages, so this file imports the standard library alone.
"""

import ctypes
import os
import signal
import sys
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from functools import cache
from pathlib import Path

SET_PDEATHSIG, SET_CHILD_SUBREAPER = 1, 36
END_S = 10.0
"""Most seconds for killed processes to be gone."""
POLL_S = 0.01
PARENT_POLL_S = 0.2
NOT_STARTED = "the program does not start: "
"""Beginning of a supervisor's line on standard error where its program does not start; the reason follows."""
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals that end a supervisor with its program, where they are not ignored."""
UNCHANGED = {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGCONT, *range(32, 34)}
"""Signals that a supervisor does not ignore. The C library keeps 32 and 33 to itself."""
MARK = "RLCORE_PROGRAM"
"""Variable of the environment that marks a supervised program and all that it starts."""
ENDED = frozenset("ZXx")
"""States of a process or thread that has ended, in /proc/PID/stat."""


def adopt_orphans() -> None:
    """Make this process the parent of each descendant whose own parent ends, so that it stays a descendant.

    Only Linux has such a setting; elsewhere nothing happens.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def supervised(command: Sequence[str]) -> list[str]:
    """Return the command line that runs `command` under a supervisor, which has the program's exit code.

    The supervisor kills all descendants of the program when the program ends, when this process ends or is killed, and on the
    signals ENDING.
    """
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def marked() -> dict[str, str]:
    """Return a variable for a supervised program's environment, by which `end_marked` and this process's guard find it."""
    return {MARK: f"{_guarded(os.getpid())}-{uuid.uuid4().hex}"}


@cache
def _guarded(process: int) -> str:
    """Start the guard of this process, and return the beginning of the marks that it looks for."""
    run = f"{process}-{uuid.uuid4().hex}"
    nothing = [(os.POSIX_SPAWN_OPEN, stream, os.devnull, os.O_RDWR, 0) for stream in range(3)]
    command = [sys.executable, "-I", "-S", __file__, str(process), "--guard", run]
    os.posix_spawn(sys.executable, command, os.environ, file_actions=nothing, setsid=True)
    return run


def end_marked(mark: str) -> None:
    """Kill the processes whose environment has a mark that begins with `mark`, until none lives."""
    assignment, deadline = f"{MARK}={mark}".encode(), time.monotonic() + END_S
    found = {0}
    while found and time.monotonic() < deadline:
        found = set()
        for folder in Path("/proc").glob("[0-9]*"):
            for file in _environments(folder):
                with suppress(OSError):  # it has ended meanwhile, or is another user's
                    if any(one.startswith(assignment) for one in file.read_bytes().split(b"\0")):
                        found.add(int(folder.name))
        for process in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        if found:
            time.sleep(POLL_S)


def _environments(folder: Path) -> list[Path]:
    """Return the files with a process's environment, which those of its threads have once the main one has ended."""
    with suppress(OSError):
        if _state_and_parent(folder)[0] in ENDED:
            return [thread / "environ" for thread in living_threads(int(folder.name))]
    return [folder / "environ"]


def end_with(parent: int) -> None:
    """Kill all descendants of this process, the group that it leads and itself once `parent` has ended; a thread watches."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_POLL_S)
        end_descendants(os.getpid())
        if os.getpgrp() == os.getpid():  # else the group holds other processes, such as the script that started the parent
            os.killpg(0, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def end_descendants(process: int) -> None:
    """Kill the descendants of a process until none lives, those that start meanwhile too. The process itself goes on.

    Children of this process are reaped. A program that forks and ends all the time may hide from each look at /proc, but the
    wait for a child shows that it lives.
    """
    deadline = time.monotonic() + END_S
    while time.monotonic() < deadline:
        living = descendants(process)
        _kill(living, process)
        if process == os.getpid():
            if _ended_children(deadline):
                return
        elif not living:
            return
        else:
            time.sleep(POLL_S)


def _kill(processes: Set[int], spared: int) -> None:
    """Kill processes, each with its group unless the process `spared` is in it."""
    for one in processes:
        with suppress(ProcessLookupError, PermissionError):
            if (group := os.getpgid(one)) != os.getpgid(spared):
                os.killpg(group, signal.SIGKILL)  # at once: one that forks and ends could be missed for ever
            os.kill(one, signal.SIGKILL)


def _ended_children(deadline: float) -> bool:
    """Kill and reap this process's children for POLL_S. Return whether none is left."""
    until = min(time.monotonic() + POLL_S, deadline)
    while time.monotonic() < until:
        _kill(_children(), os.getpid())  # before they are reaped: a process that has ended still names its group
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return True
    return False


def _children() -> set[int]:
    """Return this process's children, those that have ended too, by one short read; none on a system without /proc."""
    found = set[int]()
    for file in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # its thread has ended meanwhile
            found |= set(map(int, file.read_text().split()))
    return found


def descendants(process: int) -> set[int]:
    """Return the process ids of all living descendants of a process; none on a system without /proc."""
    children: dict[int, set[int]] = defaultdict(set)
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            state, parent = _state_and_parent(folder)
            if state not in ENDED or living_threads(int(folder.name)):
                children[parent].add(int(folder.name))
    found, looked_at = set[int](), [process]
    while looked_at:
        new = children[looked_at.pop()] - found
        found |= new
        looked_at += new
    return found


def living_threads(process: int) -> list[Path]:
    """Return the folders in /proc of a process's living threads; none on a system without /proc.

    A process whose main thread has ended goes on in its other threads. Linux then shows the process as a zombie, and its
    environment in the folders of those threads alone.
    """
    found = []
    with suppress(OSError):  # it has ended meanwhile
        for thread in Path(f"/proc/{process}/task").iterdir():
            with suppress(OSError):
                if _state_and_parent(thread)[0] not in ENDED:
                    found.append(thread)
    return found


def _state_and_parent(folder: Path) -> tuple[str, int]:
    # The command's name ends at the last parenthesis, and may hold any character.
    state, parent = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
    return state, int(parent)


def main(arguments: Sequence[str]) -> None:
    """Run a command under two supervisors: `arguments` are the parent's process id and the command.

    The outer one ends what is left where the program kills or stops the inner one, its parent.
    """
    if arguments[1] == "--guard":
        for number in ENDING:
            signal.signal(number, signal.SIG_IGN)
        while os.getppid() == int(arguments[0]):
            time.sleep(PARENT_POLL_S)
        end_marked(arguments[2])
        return
    _supervise(int(arguments[0]), lambda: _supervise(os.getppid(), lambda: _become(arguments[1:])))


def _supervise(parent: int, become: Callable[[], None]) -> None:
    """Fork the process that `become` is run in, and end with its exit code. End it, and its descendants, with `parent`."""
    program = 0
    changed = [
        number
        for number in signal.valid_signals().difference(UNCHANGED)
        if signal.getsignal(number) != signal.SIG_IGN or number in (signal.SIGPIPE, signal.SIGXFSZ)  # which Python ignores
    ]
    for number in changed:
        signal.signal(number, (lambda *_: _leave(program, -signal.SIGKILL)) if number in ENDING else signal.SIG_IGN)
    adopt_orphans()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)  # the program may have stopped this process
    program = os.fork()
    if program == 0:
        for number in changed:
            signal.signal(number, signal.SIG_DFL)
        os.setsid()
        become()
    end_with(parent)  # starts a thread, which has to come after the fork
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)  # a reader of the program's output then sees its end
    _leave(program, os.waitstatus_to_exitcode(os.waitpid(program, 0)[1]))


def _become(command: Sequence[str]) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    try:
        os.execvp(command[0], list(command))
    except OSError as error:
        os.write(2, f"{NOT_STARTED}{error}\n".encode(errors="replace"))
        os._exit(126)


def _leave(program: int, code: int) -> None:
    """Kill the program's remaining descendants, then end with its exit code, or by its signal where the code is negative."""
    if sys.platform != "linux":  # where no descendants are found, and no orphans adopted
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(program, signal.SIGKILL)
    end_descendants(os.getpid())
    if code >= 0:
        os._exit(code)
    with suppress(OSError, ValueError):
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    time.sleep(END_S)
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
