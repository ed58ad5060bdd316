"""What a run says of itself while it runs, and how it ended."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlcore.run.report import recorded_progress
from rlcore.run.report.recorded_progress import RunError, StatusFile, read_status
from rlcore.spi import CheckpointError, InterruptedRun, NonFiniteError


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=1000.0, set_by=0.0)
    own = SimpleNamespace(time=lambda: clock.now + clock.set_by, monotonic=lambda: clock.now)
    monkeypatch.setattr(recorded_progress, "time", own)
    return clock


def test_each_event_stands_in_the_file_at_once(tmp_path: Path, clock: SimpleNamespace) -> None:
    file = StatusFile(tmp_path / "status.json")
    file.begins(4, 10)
    for step in (5, 6):
        file.phase("generation, of which nothing may remain")
        clock.now += 3.0
        file.phase("train")
        clock.now += 1.0
        file.ended_step(step)
    found = read_status(tmp_path / "status.json")
    assert found is not None
    assert (found.process, found.step, found.num_steps, found.step_s) == (os.getpid(), 6, 10, 4.0)
    assert (found.state, found.phase, found.phase_since, found.started) == ("running", "train", 1008.0, 1000.0)
    file.close(None)
    ended = read_status(tmp_path / "status.json")
    assert ended is not None
    assert (ended.state, ended.error) == ("complete", None)
    json.loads((tmp_path / "status.json").read_text())


def test_the_pace_is_that_of_recent_steps_and_not_of_the_first_evaluation(tmp_path: Path, clock: SimpleNamespace) -> None:
    file = StatusFile(tmp_path / "status.json")
    file.begins(0, 100)
    clock.now += 500.0
    file.ended_step(0)
    assert file.status.step_s is None
    for step in range(1, 31):
        clock.now += 50.0 if step <= 10 else 2.0
        file.ended_step(step)
    assert file.status.step_s == 2.0
    file.close(None)


@pytest.mark.parametrize("set_by", [3600.0, -3600.0])
def test_a_clock_that_is_set_changes_no_pace(tmp_path: Path, clock: SimpleNamespace, set_by: float) -> None:
    file = StatusFile(tmp_path / "status.json")
    file.begins(0, 10)
    for step in (1, 2):
        clock.now += 4.0
        file.ended_step(step)
        clock.set_by = set_by
    assert (file.status.step_s, file.status.phase_since) == (4.0, 1008.0 + set_by)
    file.close(None)


@pytest.mark.parametrize(
    ("error", "state", "told"),
    [
        (NonFiniteError("the loss is NaN"), "failed", RunError(exit_code=7, message="the loss is NaN\nsaved in x")),
        (InterruptedRun("stopped"), "interrupted", RunError(exit_code=130, message="stopped\nsaved in x")),
        (KeyboardInterrupt(), "interrupted", RunError(exit_code=130, message="interrupted")),
        (ZeroDivisionError("\udcff"), "failed", RunError(exit_code=70, message="ZeroDivisionError: \udcff\nsaved in x")),
    ],
)
def test_how_a_run_ended(tmp_path: Path, error: BaseException, state: str, told: RunError) -> None:
    error.add_note("saved in x")
    StatusFile(tmp_path / "status.json").close(error)
    found = read_status(tmp_path / "status.json")
    assert found is not None
    assert (found.state, found.error) == (state, told)


@pytest.mark.parametrize("text", [None, ""])
def test_before_its_run_writes_there_is_no_status(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "status.json").write_text(text)
    assert read_status(tmp_path / "status.json") is None


@pytest.mark.parametrize("name", ["started", "phase_since", "step_s"])
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
def test_times_of_a_status_are_finite(tmp_path: Path, name: str, value: str) -> None:
    path = tmp_path / "status.json"
    StatusFile(path).close(None)
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, name: float(value)}))
    with pytest.raises(CheckpointError, match=rf"status\.json\.{name}: .*finite"):
        read_status(path)


@pytest.mark.parametrize("text", ["[]", '{"state": "running"}', '{"error": null, "odd": 1}', "{"])
def test_a_damaged_status_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "status.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"status\.json"):
        read_status(tmp_path / "status.json")


@pytest.mark.parametrize("name", ["step", "num_steps"])
def test_no_status_has_a_negative_step(tmp_path: Path, name: str) -> None:
    path = tmp_path / "status.json"
    StatusFile(path).close(None)
    path.write_text(json.dumps({**json.loads(path.read_text()), name: -1}))
    with pytest.raises(CheckpointError, match=rf"status\.json\.{name}: .*-1"):
        read_status(path)
