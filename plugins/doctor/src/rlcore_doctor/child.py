"""Runs a program of this Python in a process group of its own, with a time limit, and ends the whole group."""

import os
import re
import resource
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO

from attrs import frozen

MAX_BYTES = 2**22
"""Most bytes that are read of the standard output of a process."""
MAX_CHARACTERS = 300
"""Most characters of the line that says how a process ended."""
_LAST_BYTES = 2**16
"""Bytes that are read of the end of its standard error."""
_FILE_BYTES = 2**30
"""Most bytes of a file that it writes."""
_OWN_FRAME = rf'  File "(?:<|{re.escape(sysconfig.get_path("stdlib"))}/(?!site-packages)).*\n'
_CRASH = re.compile(rf'^Current thread .*\n(?:{_OWN_FRAME})*  (File ".*)', re.MULTILINE)
"""The innermost file of a crash that is not Python's own; faulthandler prints all."""
_running: set[subprocess.Popen[bytes]] = set()


@frozen(kw_only=True)
class Outcome:
    """The end of a process: its output and exit code."""

    output: str
    """Its standard output."""
    errors: str
    """The end of its standard error."""
    code: int | None
    """Its exit code; None where it was still running at its time limit."""

    @property
    def ending(self) -> str:
        """The end of the process in words, with the file in which it crashed, or the last line of its standard error."""
        lines = _CRASH.findall(self.errors) or self.errors.strip().splitlines()
        last = f": {lines[-1].strip():.{MAX_CHARACTERS}}" if lines else ""
        if self.code is None:
            return f"did not end in time{last}"
        if self.code < 0:
            with suppress(ValueError):
                return f"was ended by {signal.Signals(-self.code).name}{last}"
        return f"ended with code {self.code}{last}"


def run(arguments: Sequence[str], seconds: float) -> Outcome:
    """Run `python ARGUMENTS` for at most so many seconds. The folder that it runs in is no source of modules."""
    # Files rather than pipes: a daemon that the program leaves behind would hold a pipe open.
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-P", "-X", "faulthandler", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            start_new_session=True,
        )
        _running.add(process)
        try:
            with suppress(AttributeError, OSError):  # Linux alone can limit another process
                resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (_FILE_BYTES, _FILE_BYTES))
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
            process.wait()
            _running.discard(process)
        return Outcome(
            output=_read(output, 0), errors=_read(errors, max(0, errors.seek(0, os.SEEK_END) - _LAST_BYTES)), code=code
        )


def _read(file: IO[bytes], start: int) -> str:
    file.seek(start)
    return file.read(MAX_BYTES).decode(errors="replace")


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)


def end_all() -> None:
    """End all processes that threads wait for."""
    for process in list(_running):
        _end(process)


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Raise SystemExit where SIGTERM comes, so that no process of `run` is left behind. For the main thread."""
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)
