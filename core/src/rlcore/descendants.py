"""What a process has started, and what that has started: found by their parents, whatever sessions they have made."""

import ctypes
import os
import signal
import sys
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

SET_CHILD_SUBREAPER = 36
END_S = 10.0
"""Most seconds for killed processes to be gone."""
POLL_S = 0.01
ENDED = frozenset("ZXx")
"""States of a process or thread that runs nothing any more."""


def adopt_orphans() -> None:
    """Be the parent, from now on, of what descendants of this process leave behind as they end: so it stays a descendant. Linux
    alone knows this; elsewhere nothing happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)


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
