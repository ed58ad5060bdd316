"""schedule.jsonl: its lines, and what a resumed run makes of them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli

from rlcore_rollout.schedule_file import append_step, begin_schedule, rewind_schedule
from rlcore_rollout.trace_records import GroupRecord, SampleRecord, StepRecord

AHEAD = (
    "algorithm.fake.generation_ratio=true",
    "async.max_staleness=1",
    "run.num_steps=2",
    "training.prompts_per_step=1",
    "training.minibatches_per_step=1",
    "rollout.samples_per_prompt=2",
)


def record(step: int) -> StepRecord:
    sample = SampleRecord(turns=(((0, 3),),), digest="ab")
    group = GroupRecord(number=step - 1, began=0, samples=(sample, sample))
    return StepRecord(step=step, version=step - 1, groups=(group,), next=step)


@pytest.fixture
def path(tmp_path: Path, prepared: Callable[..., Any]) -> Path:
    """The schedule of three steps."""
    file = tmp_path / "schedule.jsonl"
    begin_schedule(file, prepared(*AHEAD), 0)
    for step in (1, 2, 3):
        append_step(file, record(step))
    return file


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()[1:]]


def test_a_resumed_run_goes_on_behind_its_step(path: Path, prepared: Callable[..., Any]) -> None:
    rewind_schedule(path, 2)
    begin_schedule(path, prepared(*AHEAD), 2)
    append_step(path, record(3))
    assert steps(path) == [1, 2, 3]
    rewind_schedule(path, -1)
    begin_schedule(path, prepared(*AHEAD), 0)
    assert steps(path) == []


def test_a_run_without_a_schedule_writes_none(tmp_path: Path, prepared: Callable[..., Any]) -> None:
    begin_schedule(tmp_path / "schedule.jsonl", prepared(), 0)
    rewind_schedule(tmp_path / "schedule.jsonl", 0)
    assert not (tmp_path / "schedule.jsonl").exists()


def test_its_first_line_is_the_recipe(path: Path) -> None:
    assert tomli.loads(json.loads(path.read_text().splitlines()[0])["recipe"])["async"]["max_staleness"] == 1


def test_a_line_that_a_crash_cut_short_is_left_out(path: Path) -> None:
    with path.open("a") as file:
        file.write('{"step":4,"gro')
    rewind_schedule(path, 3)
    append_step(path, record(4))
    assert steps(path) == [1, 2, 3, 4]
