"""Runs a program of this Python in a process of its own, with a time limit, and ends all that it started."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from typing import IO

from attrs import frozen

MAX_BYTES = 2**22
"""Most bytes that are read of what a process prints."""


@frozen(kw_only=True)
class Outcome:
    """How a process ended."""

    output: str
    """Its standard output."""
    errors: str
    """Its standard error."""
    code: int | None
    """Its exit code; None where it was still running at its time limit."""

    @property
    def ending(self) -> str:
        """How it ended, in words, with the last line of its standard error."""
        lines = self.errors.strip().splitlines()
        last = f": {lines[-1].strip()}" if lines else ""
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
            [sys.executable, "-P", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return Outcome(output=_read(output), errors=_read(errors), code=code)


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(MAX_BYTES).decode(errors="replace")
