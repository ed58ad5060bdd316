"""Whether a run lives and how it ended, from what it leaves in its directory."""

import fcntl
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlcore.run.report.progress import Progress
from rlcore.run.report.recorded_progress import Status, StatusFile, read_status
from rlcore.run.storage.run_directory import RunDirectory
from rlcore.spi import InterruptedRun, NonFiniteError
from rlcore_report.run_state import RunState, run_state

Run = Callable[..., dict[str, Any]]

HOLDER = """
import sys, time
from pathlib import Path
from rlcore.run.report.recorded_progress import StatusFile
from rlcore.run.storage.run_directory import RunDirectory
directory = RunDirectory(path=Path(sys.argv[1]))
with directory.locked():
    StatusFile(directory.status_file).phase("generation")
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}\n')
    return RunDirectory(path=tmp_path)


def test_a_process_that_is_killed_is_seen_to_be_gone(directory: RunDirectory) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(directory.path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        living = run_state(directory)
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    assert living.status is not None
    assert (living.state, living.exit_code, living.status.phase) == ("running", 0, "generation")
    assert living.owner == f"process {holder.pid} on {socket.gethostname()}"
    assert living.last == {"step": 2, "loss": 1.0}
    dead = run_state(directory)
    assert (dead.state, dead.exit_code, dead.error, dead.left_s) == ("killed", 1, None, None)


@pytest.mark.parametrize("text", ["", "?", "process"])
def test_a_run_goes_on_whose_lock_has_another_text(directory: RunDirectory, text: str) -> None:
    with directory.locked():
        (directory.path / ".lock").write_text(text)
        assert run_state(directory).state == "running"
    assert run_state(directory).state == "ended"


def test_a_run_on_another_machine_is_told_by_its_lock(directory: RunDirectory) -> None:
    lock = directory.path / ".lock"
    lock.write_text("process 1 on elsewhere\n")
    StatusFile(directory.status_file)
    assert run_state(directory).state == "killed"
    with lock.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert run_state(directory).state == "running"


def test_a_resumed_run_that_loads_is_not_told_by_the_one_before(directory: RunDirectory) -> None:
    StatusFile(directory.status_file).close(None)
    with directory.locked():
        found = run_state(directory)
    assert (found.state, found.status, found.left_s) == ("running", None, None)


def test_a_run_that_ends_meanwhile_was_not_killed(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its metrics are read after its lock was looked at, and before its end is written and the lock given back."""
    status, held, real = StatusFile(directory.status_file), directory.locked(), RunDirectory.read_metrics
    held.__enter__()

    def ends(self: RunDirectory) -> Any:
        status.close(None)
        held.__exit__(None, None, None)
        return real(self)

    monkeypatch.setattr(RunDirectory, "read_metrics", ends)
    assert run_state(directory).state == "running"
    monkeypatch.undo()
    assert run_state(directory).state == "complete"


def test_a_run_that_begins_meanwhile_was_not_killed(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its status is read after the lock was looked at, which nobody had."""
    StatusFile(directory.status_file)
    (directory.path / ".lock").write_text("process 1 on elsewhere\n")
    held, real = directory.locked(), read_status

    def begins(path: Path) -> Status | None:
        monkeypatch.undo()
        held.__enter__()
        StatusFile(path)
        return real(path)

    monkeypatch.setattr("rlcore_report.run_state.read_status", begins)
    found = run_state(directory)
    held.__exit__(None, None, None)
    assert (found.state, found.exit_code, found.owner) == ("running", 0, f"process {os.getpid()} on {socket.gethostname()}")
    assert run_state(directory).state == "killed"


def test_where_nothing_can_be_locked_a_living_process_counts(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no locks here")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with directory.locked():
        assert run_state(directory).state == "running"
    (directory.path / ".lock").write_text(f"process {os.getpid()} on elsewhere\n")
    assert run_state(directory).state == "ended"


@pytest.mark.parametrize(
    ("error", "state", "code"),
    [(None, "complete", 0), (NonFiniteError("NaN"), "failed", 7), (InterruptedRun("stopped"), "interrupted", 130)],
)
def test_how_a_run_ended_gives_the_exit_code(directory: RunDirectory, error: Exception | None, state: str, code: int) -> None:
    with directory.locked():
        StatusFile(directory.status_file).close(error)
    found = run_state(directory)
    assert (found.state, found.exit_code) == (state, code)


def test_a_run_of_before_there_was_a_status(directory: RunDirectory) -> None:
    assert run_state(directory) == RunState(state="ended", status=None, owner="", last={"step": 2, "loss": 1.0})
    directory.metrics_file.unlink()
    assert run_state(directory).last == {}


def test_what_is_left_follows_from_the_pace(directory: RunDirectory) -> None:
    with directory.locked():
        file = StatusFile(directory.status_file)
        file.begins(3, 10)
        assert run_state(directory).left_s is None
        file.ended_step(4)
        state = run_state(directory)
    assert state.status is not None
    assert state.status.step_s is not None
    assert state.left_s == pytest.approx(6 * state.status.step_s)


class Watching(Progress):
    """Looks at its run as another process would, in the midst of it."""

    states: list[RunState]

    def __init__(self, directory: RunDirectory) -> None:
        self.directory, self.states = directory, []

    def phase(self, name: str) -> None:
        if name == "refit":
            self.states.append(run_state(self.directory))


def test_a_run_is_seen_from_outside_while_it_goes_on_and_behind_its_end(run: Run, tmp_path: Path) -> None:
    directory = RunDirectory(path=tmp_path / "runs" / "run")
    watching = Watching(directory)
    run("run.num_steps=3", progress=watching)
    seen = [state.status for state in watching.states]
    assert all(state.state == "running" for state in watching.states)
    assert [(status.phase, status.num_steps) for status in seen if status is not None] == [("refit", 3)] * len(seen)
    assert {status.step for status in seen if status is not None} >= {0, 1, 2}
    ended = run_state(directory)
    assert ended.status is not None
    assert (ended.state, ended.exit_code, ended.status.step, ended.last["step"]) == ("complete", 0, 3, 3)
