"""schedule.jsonl: what a resumed run makes of it, and what is wrong with a file that is to be replayed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli

from rlcore.run.rollout.rollout_trace import GroupRecord, SampleRecord, StepRecord
from rlcore.run.storage.schedule_file import append_step, begin_schedule, read_replay, rewind_schedule
from rlcore.spi import ConfigError

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


def refused(path: Path, plan: Any, *, resume: bool = False) -> dict[str, str]:
    """What is found, by the path of each problem."""
    with pytest.raises(ConfigError) as raised:
        read_replay(path, plan, resume=resume)
    problems = raised.value.problems
    assert len({problem.path for problem in problems}) == len(problems)
    return {problem.path: problem.found for problem in problems}


def test_its_steps_are_read_as_they_were_written(path: Path, prepared: Callable[..., Any]) -> None:
    recorded = read_replay(path, prepared(*AHEAD, "run.num_steps=3"), resume=False)
    assert list(recorded.steps) == [record(1), record(2), record(3)]
    assert len(read_replay(path, prepared(*AHEAD), resume=False).steps) == 2


def test_what_a_schedule_is_not_of_may_change(path: Path, prepared: Callable[..., Any]) -> None:
    plan = prepared(*AHEAD, "optimizer.learning_rate=0.2", "run.name=other", "checkpoint.every_n_steps=1")
    assert len(read_replay(path, plan, resume=False).steps) == 2


def test_a_resumed_run_goes_on_behind_its_step(path: Path, prepared: Callable[..., Any]) -> None:
    rewind_schedule(path, 2)
    begin_schedule(path, prepared(*AHEAD), 2)
    append_step(path, record(3))
    assert steps(path) == [1, 2, 3]
    rewind_schedule(path, -1)
    begin_schedule(path, prepared(*AHEAD), 0)
    assert steps(path) == []


def test_a_line_that_a_crash_cut_short_is_left_out(path: Path, prepared: Callable[..., Any]) -> None:
    with path.open("a") as file:
        file.write('{"step":4,"gro')
    assert len(read_replay(path, prepared(*AHEAD, "run.num_steps=3"), resume=False).steps) == 3
    rewind_schedule(path, 3)
    append_step(path, record(4))
    assert steps(path) == [1, 2, 3, 4]


def test_a_run_without_a_schedule_writes_none(tmp_path: Path, prepared: Callable[..., Any]) -> None:
    begin_schedule(tmp_path / "schedule.jsonl", prepared(), 0)
    rewind_schedule(tmp_path / "schedule.jsonl", 0)
    assert not (tmp_path / "schedule.jsonl").exists()


def test_a_recipe_that_changed_on_the_way_is_said(path: Path, prepared: Callable[..., Any]) -> None:
    changed = prepared(*AHEAD, "rollout.temperature=0.5", "run.num_steps=5")
    begin_schedule(path, changed, 3)
    begin_schedule(path, changed, 3)  # which is the file's recipe by now
    assert len(path.read_text().splitlines()) == 5
    for step in (4, 5):
        append_step(path, record(step))
    assert refused(path, changed) == {"rollout.temperature": "0.5"}
    assert refused(path, prepared(*AHEAD, "run.num_steps=5")) == {"rollout.temperature": "1.0"}
    assert len(read_replay(path, prepared(*AHEAD, "run.num_steps=3"), resume=False).steps) == 3


def test_another_recipe_a_damaged_line_too_few_steps_and_a_resumed_run_are_said_at_once(
    path: Path, prepared: Callable[..., Any]
) -> None:
    lines = path.read_text().splitlines()
    damaged = json.loads(lines[2])
    damaged["groups"][0]["samples"][0]["turns"] = [[[0, -1]]]
    damaged["dropt"] = []
    path.write_text("\n".join([lines[0], "{", json.dumps(damaged), lines[3]]) + "\n")
    other = prepared(*AHEAD, "run.seed=5", "rollout.samples_per_prompt=4", "data.train.shuffle=false", "run.num_steps=9")
    assert refused(path, other, resume=True) == {
        "--replay-schedule": "--resume beside it",
        "run.seed": "5",
        "rollout.samples_per_prompt": "4",
        "data.train.shuffle": "False",
        f"{path}, line 2": "'{'",
        f"{path}, line 3.groups[0].samples[0].turns[0][0][1]": "-1",
        f"{path}, line 3.dropt": "an unknown key",
        "run.num_steps": "9",
    }


def test_lines_that_do_not_fit_together_are_named(path: Path, prepared: Callable[..., Any]) -> None:
    first, *lines = path.read_text().splitlines()
    path.write_text("\n".join([first, lines[0], lines[2]]) + "\n")
    assert list(refused(path, prepared(*AHEAD))) == [f"{path}, line 3"]


@pytest.mark.parametrize("text", ["", "{}\n", '{"recipe": 3}\n', '{"recipe": "= ="}\n', "no\n"])
def test_a_file_without_a_recipe_is_none(path: Path, prepared: Callable[..., Any], text: str) -> None:
    path.write_text(text)
    assert refused(path, prepared(*AHEAD)).keys() - {f"{path}, line 1"} == {"run.num_steps"}


def test_a_file_that_is_not_there(tmp_path: Path, prepared: Callable[..., Any]) -> None:
    assert list(refused(tmp_path / "none.jsonl", prepared(*AHEAD), resume=True)) == [
        "--replay-schedule",
        str(tmp_path / "none.jsonl"),
    ]


def test_of_a_synchronous_recipe_there_is_nothing_to_replay(path: Path, prepared: Callable[..., Any]) -> None:
    assert list(refused(path, prepared("run.num_steps=2"))) == ["async"]


def test_its_first_line_is_the_recipe(path: Path) -> None:
    assert tomli.loads(json.loads(path.read_text().splitlines()[0])["recipe"])["async"]["max_staleness"] == 1
