"""What is wrong with a schedule.jsonl that is to be replayed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlcore.spi import ConfigError
from rlcore_replay.schedule_reader import read_replay
from rlcore_rollout.schedule_file import append_step, begin_schedule

from ..rollout.test_schedule_file import AHEAD, record  # type: ignore[import-not-found]
from ..rollout.test_schedule_file import path as path  # type: ignore[import-not-found]


def refused(path: Path, plan: Any, *, resume: bool = False) -> dict[str, str]:
    """What is found, by the path of each problem."""
    with pytest.raises(ConfigError) as raised:
        read_replay(path, plan, resume=resume)
    problems = raised.value.problems
    assert len({problem.path for problem in problems}) == len(problems)
    return {problem.path: problem.found for problem in problems}


def test_a_line_that_a_crash_cut_short_is_left_out(path: Path, prepared: Callable[..., Any]) -> None:
    with path.open("a") as file:
        file.write('{"step":4,"gro')
    assert len(read_replay(path, prepared(*AHEAD, "run.num_steps=3"), resume=False).recorded.steps) == 3


def test_its_steps_are_read_as_they_were_written(path: Path, prepared: Callable[..., Any]) -> None:
    recorded = read_replay(path, prepared(*AHEAD, "run.num_steps=3"), resume=False).recorded
    assert list(recorded.steps) == [record(1), record(2), record(3)]
    assert len(read_replay(path, prepared(*AHEAD), resume=False).recorded.steps) == 2


def test_what_a_schedule_is_not_of_may_change(path: Path, prepared: Callable[..., Any]) -> None:
    plan = prepared(*AHEAD, "optimizer.learning_rate=0.2", "run.name=other", "checkpoint.every_n_steps=1")
    assert len(read_replay(path, plan, resume=False).recorded.steps) == 2


def test_a_recipe_that_changed_on_the_way_is_said(path: Path, prepared: Callable[..., Any]) -> None:
    changed = prepared(*AHEAD, "rollout.temperature=0.5", "run.num_steps=5")
    begin_schedule(path, changed, 3)
    begin_schedule(path, changed, 3)  # which is the file's recipe by now
    assert len(path.read_text().splitlines()) == 5
    for step in (4, 5):
        append_step(path, record(step))
    assert refused(path, changed) == {"rollout.temperature": "0.5"}
    assert refused(path, prepared(*AHEAD, "run.num_steps=5")) == {"rollout.temperature": "1.0"}
    assert len(read_replay(path, prepared(*AHEAD, "run.num_steps=3"), resume=False).recorded.steps) == 3


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
