"""`rlcore status`: what is printed of a run, and with which exit code."""

import json
from pathlib import Path

import pytest
from attrs import evolve

from rlcore.run.report.recorded_progress import RunError, Status, StatusFile
from rlcore.spi import NonFiniteError
from rlcore_report.run_state import RunState
from rlcore_report.status_command import duration, lines_of

STATUS = Status(
    state="running",
    process=7,
    host="box",
    started=100.0,
    step=4,
    num_steps=10,
    phase="train",
    phase_since=1000.0,
    step_s=30.0,
    error=None,
)
LAST = {"step": 4, "reward_mean": 0.5, "time/total_s": 2.0, "time/train_s": 1.0}


def test_a_run_that_goes_on() -> None:
    state = RunState(state="running", status=STATUS, owner="process 7 on box", last=LAST)
    assert list(lines_of(state, 1012.0)) == [
        "running: process 7 on box",
        "4 of 10 steps done, train for 12 s",
        "30 s a step, 3 min 00 s left",
        "reward 0.500",
        "2.00 s (train 1.00)",
    ]


def test_a_run_that_was_killed_and_one_that_failed() -> None:
    killed = list(lines_of(RunState(state="killed", status=STATUS, owner="process 7 on box", last={}), 1012.0))
    assert killed[:3] == ["killed: process 7 on box", "4 of 10 steps done, 12 s ago", "30 s a step"]
    assert "--resume" in killed[-1]
    error = RunError(exit_code=7, message="the loss is NaN")
    failed = RunState(state="failed", status=evolve(STATUS, state="failed", error=error), owner="", last={})
    assert list(lines_of(failed, 1012.0))[-1] == "error (exit code 7): the loss is NaN"


def test_a_run_without_status_is_told_by_its_metrics() -> None:
    assert list(lines_of(RunState(state="ended", status=None, owner="", last={"step": 3}), 0.0)) == ["ended", "step 3"]


def test_the_exit_code_is_that_of_the_run(invoke, tmp_path: Path) -> None:
    assert invoke("status", str(tmp_path)).exit_code == 6, "no run"
    (tmp_path / "recipe.toml").write_text("")
    StatusFile(tmp_path / "status.json").close(NonFiniteError("the loss is NaN"))
    result = invoke("status", str(tmp_path))
    assert result.exit_code == 7
    assert "the loss is NaN" in result.stdout
    told = json.loads(invoke("status", str(tmp_path), "--json").stdout)
    assert (told["state"], told["exit_code"], told["status"]["error"]["message"]) == ("failed", 7, "the loss is NaN")


def test_whatever_an_error_says_can_be_printed(invoke, tmp_path: Path) -> None:
    """Halves of characters, and what a terminal would obey; numbers that JSON has not are null."""
    (tmp_path / "recipe.toml").write_text("")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": NaN}\n')
    StatusFile(tmp_path / "status.json").close(NonFiniteError("odd \ud83d \x1b]0;title\x07"))
    result = invoke("status", str(tmp_path))
    assert result.exit_code == 7
    assert "odd \\ud83d \\x1b]0;title\\x07" in result.stdout
    told = json.loads(invoke("status", str(tmp_path), "--json").stdout, parse_constant=pytest.fail)
    assert told["last"] == {"step": 1, "loss": None}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1.0, "0 s"),
        (59.4, "59 s"),
        (60.0, "1 min 00 s"),
        (3599.9, "1 h 00 min"),
        (7500.0, "2 h 05 min"),
        (180000.0, "2 d 02 h"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
