"""The stacks of a process that does not answer, down to native code, as py-spy reads them from outside."""

import shutil
import subprocess
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path

from rlcore_workers.descendants import descendants

DUMP_S, ALL_S = 20.0, 45.0
"""Most seconds of one look at a process, since reading the symbols of large libraries takes a while; and of all looks."""
MAX_PROCESSES = 8
"""Most descendants whose stacks are read."""
MAX_SHOWN_LINES, MAX_CHARACTERS = 40, 160
"""Most lines in an error, and most characters of each: names of C++ may have thousands."""
OPTIONS = (("--native",), (), ("--nonblocking",))
"""The ways to look at a process, the one that shows most first: symbols may take too long, and the last one alone reads a
process that is stopped."""
HINT = "Its stack was not read, since py-spy is not installed on its machine: pip install 'rlcore-workers[stacks]'"


def stacks_of(process: int) -> str:
    """Return the stacks of a process and of its descendants in Python, with the threads first that do something.

    Without py-spy, or where it fails, the text says so. The processes stand still for as long as they are read.
    """
    program = _program()
    if program is None:
        return HINT
    deadline = time.monotonic() + ALL_S
    text, is_read = _dump(program, process, deadline)
    parts = [f"The stacks of process {process}, by py-spy:", text if not is_read else _sorted(text)]
    for child in sorted(descendants(process))[:MAX_PROCESSES]:
        text, is_read = _dump(program, child, deadline)
        if is_read:  # most others are no Python
            parts += [f"Those of its descendant {child}:", _sorted(text)]
    return "\n".join(parts)


def beginning_of(stacks: str) -> str:
    """Return as many lines of stacks as an error shows."""
    lines = [line if len(line) <= MAX_CHARACTERS else f"{line[: MAX_CHARACTERS - 1]}…" for line in stacks.splitlines()]
    left = len(lines) - MAX_SHOWN_LINES
    return "\n".join([*lines[:MAX_SHOWN_LINES], *([f"({left} more lines in its log)"] if left > 0 else [])])


def _program() -> str | None:
    """Return the path of py-spy: beside this Python, or on the PATH."""
    own = Path(sysconfig.get_path("scripts")) / "py-spy"
    return str(own) if own.is_file() else shutil.which("py-spy")


def _dump(program: str, process: int, deadline: float) -> tuple[str, bool]:
    """Return what py-spy says of one process, and whether that is its stacks."""
    said = "py-spy had no time left"
    for options in OPTIONS:
        if (left_s := deadline - time.monotonic()) <= 0:
            break
        try:
            ran = _run([program, "dump", "--pid", str(process), *options], min(DUMP_S, left_s))
        except subprocess.TimeoutExpired:
            said = f"py-spy took longer than {DUMP_S:g} s"
            continue
        if ran.returncode == 0:
            return ran.stdout.strip(), True
        said = f"py-spy failed: {ran.stderr.partition('Stack backtrace:')[0].strip()}"  # whose own stack tells nothing
    return said, False


def _run(command: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=timeout_s)


def _sorted(text: str) -> str:
    """Put the threads first that hold Python's lock, then those that are deepest in Python: what waits for work is not."""
    head, *threads = text.split("\nThread ")

    def depth(thread: str) -> tuple[bool, int]:
        title, *frames = thread.splitlines()
        return "gil" in title, sum(".py:" in frame and "(threading.py:" not in frame for frame in frames)

    return "\n".join([head, *(f"Thread {thread}" for thread in sorted(threads, key=depth, reverse=True))])
