"""Resuming when something is gone or damaged loses nothing that was there."""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlcore.run.data.rows_digest import RowDigests
from rlcore.run.report.progress import Progress
from rlcore.run.storage.checkpoint import read_loop_state
from rlcore.run.storage.resuming import check_rows
from rlcore.spi import CheckpointError, Row
from rlcore.testing.fakes.environment import FakeEnvironment
from rlcore.testing.fakes.generator import FakeGenerator

from ..conftest import read_metrics  # type: ignore[import-not-found]

Run = Callable[..., dict[str, Any]]


class Notes(Progress):
    """Keeps what is noted."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        self.texts.append(text)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file but the lock, which a refused run may write."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def remove(folder: Path) -> None:
    for path in folder.iterdir():
        remove(path) if path.is_dir() else path.unlink()
    folder.rmdir()


def test_a_checkpoint_with_a_damaged_manifest_is_passed_over(run: Run, tmp_path: Path) -> None:
    run("run.name=whole")
    run()
    directory, notes = tmp_path / "runs" / "run", Notes()
    (directory / "checkpoints" / "step-000006" / "manifest.json").write_bytes(b"\xff")
    run(resume=True, progress=notes)
    assert ["step-000006 is damaged and passed over" in text for text in notes.texts] == [True]
    assert read_metrics(directory) == read_metrics(tmp_path / "runs" / "whole")


@pytest.mark.parametrize("num_steps", [4, 6])
def test_a_run_that_has_made_as_many_steps_says_that_none_is_left(run: Run, tmp_path: Path, num_steps: int) -> None:
    run()
    before, notes = read_metrics(tmp_path / "runs" / "run"), Notes()
    run(f"run.num_steps={num_steps}", resume=True, progress=notes)
    assert notes.texts[-1] == f"run.num_steps = {num_steps}, and 6 steps are done: none is left. Raise it to train on"
    assert read_metrics(tmp_path / "runs" / "run") == before


def test_fewer_steps_than_were_made_behind_the_newest_checkpoint_are_refused(run: Run, tmp_path: Path) -> None:
    run("checkpoint.keep=3")
    directory, notes = tmp_path / "runs" / "run", Notes()
    for step in ("step-000004", "step-000006"):
        remove(directory / "checkpoints" / step)
    before = contents(directory)
    with pytest.raises(CheckpointError, match=r"run.num_steps = 3, .* 6 steps, .* checkpoint 2: steps 4 to 6"):
        run("run.num_steps=3", "checkpoint.keep=3", resume=True)
    assert contents(directory) == before
    run("run.num_steps=3", "checkpoint.keep=3", resume=True, allow_changes=True, progress=notes)
    assert [record["step"] for record in read_metrics(directory)] == [0, 1, 2, 3]


@pytest.mark.parametrize("gone", ["folder", "checkpoints"])
def test_without_the_checkpoints_that_were_saved_nothing_is_begun_anew(run: Run, tmp_path: Path, gone: str) -> None:
    run()
    directory = tmp_path / "runs" / "run"
    for path in [directory / "checkpoints"] if gone == "folder" else list((directory / "checkpoints").iterdir()):
        remove(path)
    before = contents(directory)
    with pytest.raises(CheckpointError, match=r"no checkpoint; .* step 6 .*metrics\.jsonl\s+"):
        run(resume=True)
    assert contents(directory) == before


def test_nor_where_what_remembers_them_is_gone_too(run: Run, tmp_path: Path) -> None:
    """Such as after `cp -r runs/run/* elsewhere`, without the checkpoints."""
    run("checkpoint.at_end=false", "run.num_steps=3")
    directory = tmp_path / "runs" / "run"
    remove(directory / "checkpoints")
    (directory / ".last-saved").unlink()
    before = contents(directory)
    with pytest.raises(CheckpointError, match=r"no checkpoint.* 3 steps .* 2 steps .*\.last-saved"):
        run("checkpoint.every_n_steps=0", resume=True)
    assert contents(directory) == before


def test_nor_where_the_run_was_complete(run: Run, tmp_path: Path) -> None:
    options = ("checkpoint.every_n_steps=0", "run.num_steps=2")
    run(*options)
    directory = tmp_path / "runs" / "run"
    remove(directory / "checkpoints")
    (directory / ".last-saved").unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint.* 2 steps .*\.last-saved"):
        run(*options, resume=True)
    (directory / "summary.json").unlink()  # as where the last step's checkpoint found no space
    run(*options, resume=True)


def test_a_resumed_run_reads_its_checkpoint_once_to_see_that_it_is_whole(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("checkpoint.at_end=false", "run.num_steps=3")
    digested = []
    file_digest = hashlib.file_digest

    def counted(file: Any, digest: Any) -> Any:
        digested.append(Path(file.name).relative_to(tmp_path / "runs" / "run" / "checkpoints"))
        return file_digest(file, digest)

    monkeypatch.setattr("hashlib.file_digest", counted)
    run("checkpoint.at_end=false", "run.num_steps=3", resume=True)
    assert digested
    assert sorted(digested) == sorted(set(digested))


def test_checkpoints_alone_are_a_run_too(run: Run, tmp_path: Path) -> None:
    run()
    (tmp_path / "runs" / "run" / "metrics.jsonl").unlink()
    with pytest.raises(CheckpointError, match="already holds a run"):
        run()


def test_a_damaged_line_of_metrics_is_named_before_anything_is_changed(run: Run, tmp_path: Path) -> None:
    run()
    directory = tmp_path / "runs" / "run"
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    (directory / "metrics.jsonl").write_text("\n".join([*lines[:2], "{", *lines[3:]]) + "\n")
    before = contents(directory)
    with pytest.raises(CheckpointError, match=r"(?s)run/metrics\.jsonl is damaged.*line 3: found '\{'"):
        run("run.num_steps=8", resume=True)
    assert contents(directory) == before


class EvaluationDies(FakeGenerator):
    """Raises while it generates with temperature 0 after the fourth step, until it is told otherwise."""

    dies = True

    def begin(self, request):
        if self.dies and request.sampling.temperature == 0.0 and self.weight_version == 8:
            raise RuntimeError("the evaluation fails")
        return super().begin(request)


def test_the_rollouts_of_a_step_without_a_line_yet_stay(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registry_with: Callable[..., Any]
) -> None:
    options = ("logging.rollouts_every_n_steps=4", "run.num_steps=5")
    run(*options, "run.name=whole")
    registry = registry_with(generator=EvaluationDies)
    with pytest.raises(RuntimeError, match="the evaluation fails"):
        run(*options, registry=registry)
    rollouts = tmp_path / "runs" / "run" / "rollouts" / "step-000004.parquet"
    before = rollouts.read_bytes()
    monkeypatch.setattr(EvaluationDies, "dies", False)
    run(*options, resume=True, registry=registry)
    assert rollouts.read_bytes() == before
    assert read_metrics(tmp_path / "runs" / "run") == read_metrics(tmp_path / "runs" / "whole")


def test_a_resumed_run_has_the_rows_that_it_began_with(run: Run, tmp_path: Path) -> None:
    """The file has another row in the place of one: which step has it follows from the seed, as before."""

    def write(last: str) -> None:
        rows = [{"prompt": f"{n}+1=", "answer": str(n)} for n in range(7)] + [{"prompt": "7+1=", "answer": last}]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    data = ("data.train.source=jsonl", f"data.train.path={tmp_path / 'rows.jsonl'}")
    directory = tmp_path / "runs" / "run"
    write("8")
    run("run.num_steps=2", *data)
    write("9")
    before = contents(directory)
    with pytest.raises(CheckpointError, match="other rows"):
        run(*data, resume=True)
    assert contents(directory) == before
    notes = Notes()
    run("run.num_steps=4", *data, resume=True, allow_changes=True, progress=notes)
    assert sum("other rows" in text for text in notes.texts) == 1
    run(*data, resume=True)  # of the rows that it went on with
    write("8")
    with pytest.raises(CheckpointError, match="other rows"):
        run("run.num_steps=8", *data, resume=True)


class ChangingRows(FakeEnvironment):
    """Rows that do not follow from the seed alone."""

    start = 0

    def rows(self, split: str) -> Sequence[Row]:
        return [{**row, "start": self.start} for row in super().rows(split)]


def test_rows_of_an_environment_that_change_from_start_to_start_are_told(
    run: Run, monkeypatch: pytest.MonkeyPatch, registry_with: Callable[..., Any]
) -> None:
    registry = registry_with(environment=ChangingRows)

    def told(*options: str, resume: bool = True) -> int:
        notes = Notes()
        run(*options, registry=registry, resume=resume, progress=notes)
        return sum("the environment brings other rows" in text for text in notes.texts)

    assert told("run.num_steps=2", resume=False) == 0
    assert told("run.num_steps=3") == 0
    monkeypatch.setattr(ChangingRows, "start", 1)
    assert told("run.num_steps=4") == 1
    assert told("run.num_steps=5") == 0, "of the rows that it went on with"


def test_rows_of_an_environment_in_a_mix_are_told_and_a_checkpoint_that_knows_none_says_nothing(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registry_with: Callable[..., Any]
) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"{n}+1="}) + "\n" for n in range(8)))
    file = f'two={{source="jsonl", path="{tmp_path / "rows.jsonl"}"}}'
    mix, registry = f'data.train.mix={{one={{source="environment"}}, {file}}}', registry_with(environment=ChangingRows)
    notes = Notes()
    run(mix, "run.num_steps=2", registry=registry)
    monkeypatch.setattr(ChangingRows, "start", 1)
    run(mix, "run.num_steps=3", registry=registry, resume=True, progress=notes)
    assert sum("the environment brings other rows" in text for text in notes.texts) == 1
    note: list[str] = []
    checkpoint = tmp_path / "runs" / "run" / "checkpoints" / "step-000003"
    state = read_loop_state(checkpoint)
    assert state.own_rows is not None
    check_rows(checkpoint, RowDigests(read=state.data), note.append, allow_changes=False)
    assert note == []
