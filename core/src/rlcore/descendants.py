"""What a process has started, and what that has started: found by their parents, whatever sessions they have made.

It is a script too, `python -I -S descendants.py PARENT COMMAND...`, which runs a program and ends with it and with its own
parent, however that ends: all that the program has started ends then. So it imports the standard library alone.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

SET_PDEATHSIG, SET_CHILD_SUBREAPER = 1, 36
END_S = 10.0
"""Most seconds for killed processes to be gone."""
POLL_S = 0.01
PARENT_POLL_S = 0.2
NOT_STARTED = "the program does not start: "
"""What a supervisor's line on standard error begins with where its program does not start; then comes why."""
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals that end a supervisor with its program, where they are not ignored."""
ENDED = frozenset("ZXx")
"""States of a process or thread that runs nothing any more."""


def adopt_orphans() -> None:
    """Be the parent, from now on, of what descendants of this process leave behind as they end: so it stays a descendant. Linux
    alone knows this; elsewhere nothing happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def supervised(command: Sequence[str]) -> list[str]:
    """The command under a supervisor, which is this process's child in its place and has its exit code. All that the program
    starts ends with it, and all of it with this process, also where that is killed. The signals ENDING end it too."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def end_with(parent: int) -> None:
    """Kill all descendants of this process, the group that it leads and itself as soon as its parent is another: `parent` has
    ended."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_POLL_S)
        end_descendants(os.getpid())
        if os.getpgrp() == os.getpid():  # else there are others in it, such as the script that the parent was started by
            os.killpg(0, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def end_descendants(process: int) -> None:
    """Kill the descendants of a process until none lives, also those that are started meanwhile. The process itself goes on."""
    deadline = time.monotonic() + END_S
    while (living := descendants(process)) and time.monotonic() < deadline:
        for one in living:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(one, signal.SIGKILL)
        time.sleep(POLL_S)


def descendants(process: int) -> set[int]:
    """Those that live, by number; none where the system tells of no processes in /proc."""
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
    """The folders in /proc of a process's threads that run; none where there is no /proc. A process whose main thread has ended
    goes on in the others: the system calls it a zombie then, and tells its environment among theirs alone."""
    found = []
    with suppress(OSError):  # it has ended meanwhile
        for thread in Path(f"/proc/{process}/task").iterdir():
            with suppress(OSError):
                if _state_and_parent(thread)[0] not in ENDED:
                    found.append(thread)
    return found


def _state_and_parent(folder: Path) -> tuple[str, int]:
    # What stands before the last parenthesis is the command's name, which may hold anything.
    state, parent = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
    return state, int(parent)


def main(arguments: Sequence[str]) -> None:
    """Run a command as the supervisor."""
    program = 0
    ending = [number for number in ENDING if signal.getsignal(number) != signal.SIG_IGN]
    for number in ending:
        signal.signal(number, lambda *_: _leave(program, -signal.SIGKILL))
    adopt_orphans()
    program = os.fork()
    if program == 0:
        _become(arguments[1:], ending)
    end_with(int(arguments[0]))  # a thread, which no fork may find
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)  # whoever reads the program's output sees its end
    _leave(program, os.waitstatus_to_exitcode(os.waitpid(program, 0)[1]))


def _become(command: Sequence[str], handled: Sequence[int]) -> None:
    for number in handled:
        signal.signal(number, signal.SIG_DFL)
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    try:
        os.execvp(command[0], list(command))
    except OSError as error:
        os.write(2, f"{NOT_STARTED}{error}\n".encode(errors="replace"))
        os._exit(126)


def _leave(program: int, code: int) -> None:
    """End what the program has left behind, then end as it has: negative codes are signals."""
    if sys.platform != "linux":  # where no descendants are found, and no orphans adopted
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(program, signal.SIGKILL)
    with suppress(ChildProcessError):  # nothing is left
        os.waitpid(-1, os.WNOHANG)
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
