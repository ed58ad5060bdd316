"""Reads a run's state from the files in its directory: alive or ended, its phase, and how it ended."""

import contextlib
import fcntl
import os
import re
import socket
from pathlib import Path
from typing import Literal

from attrs import frozen

from rlcore.run.report.recorded_progress import INTERRUPTED, RunError, Status, read_status
from rlcore.run.storage.run_directory import RunDirectory
from rlcore.schema.file_limits import read_file, require_file

KILLED = 1
"""Exit code of `rlcore status` for a run whose process ended without a word."""


@frozen(kw_only=True)
class RunState:
    """A run as it is now."""

    state: Literal["running", "complete", "interrupted", "failed", "killed", "ended"]
    """"killed" where the process is gone and did not say that it ended; "ended" where there is no status.json to say how, as in
    runs of before there was one."""
    status: Status | None
    """status.json; None where there is none."""
    owner: str
    """The process that ran here last, by the lock; empty where none did."""
    last: dict[str, float]
    """The last line of metrics.jsonl; empty where there is none."""

    @property
    def left_s(self) -> float | None:
        """Seconds until the last step at the pace of recent ones; None where that is not known or nothing is left."""
        status = self.status
        if self.state != "running" or status is None or status.step_s is None:
            return None
        return max(0, status.num_steps - status.step) * status.step_s

    @property
    def error(self) -> RunError | None:
        """Return the error that ended the run before its last step, as far as it could say so."""
        return None if self.status is None or self.state == "running" else self.status.error

    @property
    def exit_code(self) -> int:
        """0 while the run goes on or where nothing is known to be wrong with its end, else what the run ended with."""
        if self.error is not None:
            return self.error.exit_code
        return {"killed": KILLED, "interrupted": INTERRUPTED}.get(self.state, 0)


def run_state(directory: RunDirectory) -> RunState:
    """Read the state of a run. CheckpointError where a line of its metrics is damaged."""
    lock = directory.path / ".lock"
    owner = _owner(lock)
    # Before the files, so that a run that ends meanwhile has not been killed.
    is_held = _is_held(lock, owner)
    status = read_status(directory.status_file)
    records = directory.read_metrics()
    state: Literal["running", "complete", "interrupted", "failed", "killed", "ended"]
    if is_held:
        state = "running"
        # Of the run before this one, which has not come to its own yet.
        if status is not None and (status.state != "running" or owner != f"process {status.process} on {status.host}"):
            status = None
    elif status is None:
        state = "ended"
    else:
        state = "killed" if status.state == "running" else status.state
    if state == "killed" and (_owner(lock) != owner or _is_held(lock, owner)):
        return run_state(directory)  # it is the status of a run that has begun since the lock was looked at
    return RunState(state=state, status=status, owner=owner, last=records[-1] if records else {})


def _owner(lock: Path) -> str:
    try:
        return read_file(lock).decode(errors="replace").strip()
    except OSError:
        return ""


def _is_held(lock: Path, owner: str) -> bool:
    """Return whether a process has the lock. Taken for a moment only where the process that wrote it may live: a run that
    begins just then would find it in use."""
    process = re.fullmatch(r"process ([0-9]+) on (.*)", owner)
    is_here = process is not None and process[2] == socket.gethostname()
    if process is not None and is_here and not _lives(int(process[1])):
        return False
    try:
        require_file(lock)
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks: what is here can be seen, what is elsewhere cannot
        return is_here
    return False


def _lives(process: int) -> bool:
    with contextlib.suppress(PermissionError):
        try:
            os.kill(process, 0)
        except (ProcessLookupError, OverflowError):
            return False
    return True
