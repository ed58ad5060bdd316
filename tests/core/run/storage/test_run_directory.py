"""The run directory: who may write to it, where it lies, and what of a run can be read from it."""

import fcntl
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas
import pytest

from rlcore.run.storage.run_directory import RunDirectory
from rlcore.spi import (
    CheckpointError,
    StorageError,
)

Run = Callable[..., dict[str, Any]]


def test_rollouts_are_readable_by_pandas(run: Run, tmp_path: Path) -> None:
    run()
    table = pandas.read_parquet(tmp_path / "runs" / "run" / "rollouts" / "step-000003.parquet")
    assert len(table) == 8 * 8
    assert (table.groupby("group")["prompt"].nunique() == 1).all()
    first = table.iloc[0]
    assert len(first["tokens"]) == len(first["loss_mask"]) == len(first["generation_logprobs"])
    assert first["loss_mask"].sum() == first["num_generated"]
    assert (first["weight_versions"][first["loss_mask"]] == 4).all()
    assert set(table["finish_reason"]) <= {"stop", "length"}


@pytest.mark.parametrize("resume", [False, True])
def test_a_directory_in_which_another_process_runs_is_left_alone(run: Run, tmp_path: Path, resume: bool) -> None:
    directory = RunDirectory(path=tmp_path / "runs" / "run")
    with directory.locked():
        with pytest.raises(CheckpointError, match=rf"in use .*\(process {os.getpid()} on "):
            run(resume=resume)
        assert [file.name for file in directory.path.iterdir()] == [".lock"]
    run(resume=resume)


def test_who_looks_at_the_lock_just_then_keeps_no_run_from_beginning(tmp_path: Path) -> None:
    """As `rlcore status` does, on another machine for example."""
    (tmp_path / ".lock").write_text("process 1 on elsewhere\n")
    with (tmp_path / ".lock").open("rb") as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        threading.Timer(0.2, lambda: fcntl.flock(looking, fcntl.LOCK_UN)).start()
        with RunDirectory(path=tmp_path).locked():
            assert (tmp_path / ".lock").read_text().startswith(f"process {os.getpid()} on ")


def test_a_directory_whose_lock_cannot_be_written_is_said(run: Run, tmp_path: Path) -> None:
    directory = tmp_path / "runs" / "run"
    directory.mkdir(parents=True)
    (directory / ".lock").symlink_to("/dev/full")
    with pytest.raises(StorageError, match="run directory .* written"):
        run()


def test_a_run_directory_may_lie_in_the_users_home(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    summary = run("run.directory=~/x", "run.num_steps=1")
    assert summary["run_directory"] == str(tmp_path / "home" / "x" / "run")
    assert (tmp_path / "home" / "x" / "run" / "metrics.jsonl").is_file()
    assert not (tmp_path / "~").exists()


def test_what_programs_found_of_forgotten_steps_is_forgotten(tmp_path: Path) -> None:
    directory = RunDirectory(path=tmp_path)
    for step in (2, 4):
        (directory.evaluations / f"step-{step:06d}" / "model").mkdir(parents=True)
    directory.metrics_file.write_text("")
    directory.rewind(2, last_rollouts=2)
    assert [path.name for path in directory.evaluations.iterdir()] == ["step-000002"]
