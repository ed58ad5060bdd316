"""Child processes whose output goes to a log file, and what error messages say of that file."""

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlcore.files import private

NUM_LINES = 30
MAX_BYTES = 2**14
"""Most bytes of a log file that are read for its last lines."""


class LoggedProcess(subprocess.Popen[bytes]):
    """A child that leads a session of its own, and whose output is appended to a file.

    Ctrl-C in the terminal does not reach it, and one signal ends it with all processes of its group.
    """

    def __init__(
        self,
        command: Sequence[str],
        log_file: Path,
        *,
        env: Mapping[str, str],
        stdin: int = subprocess.DEVNULL,
    ) -> None:
        self.log_file = log_file
        with open(log_file, "ab", opener=private) as log:
            self.log_start = log.tell()
            super().__init__(
                command,
                stdin=stdin,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
            )

    def kill_group(self) -> None:
        """Kill the process and its group, as far as they live."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def output(self) -> str:
        """Return all that the process has written so far; nothing where the file cannot be read."""
        with contextlib.suppress(OSError), self.log_file.open("rb") as log:
            log.seek(self.log_start)
            return log.read().decode(errors="replace")
        return ""

    def last_lines(self) -> str:
        """Name the log file, with the last lines that the process has written."""
        return last_lines(self.log_file, self.log_start)


def new_log_file(directory: Path | None, name: str) -> Path:
    """Return the path of a log file in `directory`, which is made; with no directory, a temporary file.

    Nothing removes the temporary file, since errors name it.
    """
    if directory is None:
        descriptor, file = tempfile.mkstemp(prefix=f"rlcore-{name}-", suffix=".log")
        os.close(descriptor)
        return Path(file)
    directory.mkdir(parents=True, exist_ok=True)
    return directory / f"{name}.log"


def append_lines(log_file: Path, text: str) -> None:
    """Append lines to a log file, if it can be written from here."""
    with contextlib.suppress(OSError), open(log_file, "a", opener=private) as file:
        file.write(f"{text}\n")


def last_lines(log_file: Path, start: int = 0) -> str:
    """Name a process's log file, with its last lines behind the first `start` bytes."""
    try:
        with log_file.open("rb") as file:
            file.seek(max(start, log_file.stat().st_size - MAX_BYTES))
            lines = file.read().decode(errors="replace").splitlines()[-NUM_LINES:]
    except OSError:
        return f"Its output is in {log_file}, on its own node"
    if not lines:
        return f"Its output is in {log_file}, where it wrote nothing"
    return "\n".join([f"Its output is in {log_file}.", "Its last lines:", *(f"  {line}" for line in lines)])
