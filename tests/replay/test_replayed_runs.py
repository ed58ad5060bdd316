"""Runs whose schedule is recorded and replayed, with the fakes: the same weights, figures and files, bit for bit."""

import asyncio
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from rlcore.registry.discovery import Registry
from rlcore.run.plan.run_plan import RunPlan
from rlcore.spi import CheckpointError, ConfigError, Observation, ResetResult, Row, StepResult, Turn
from rlcore.spi.arrays import Int64Array
from rlcore.testing.fakes.environment import FakeEnvironment
from rlcore.testing.fakes.generator import FakeGenerator, RunningSamples

from ..core.run.conftest import read_metrics  # type: ignore[import-not-found]
from ..rollout.test_asynchrony import (  # type: ignore[import-not-found]
    SLOW,
    CountsSteps,
    Killed,
    Slow,
    Watched,
    ahead,
    prompts,
    rollouts,
)

pytest.importorskip("rlcore_replay", reason="replays are of another package")
Run = Callable[..., dict[str, Any]]

UNMEASURED = ("evaluation.at_end=false", "evaluation.at_start=false", "evaluation.every_n_steps=0")
LONG = ("rollout.max_response_tokens=60", "rollout.samples_per_prompt=2")


def weights(directory: Path) -> dict[str, bytes]:
    newest = max((directory / "checkpoints").iterdir())
    return {path.name: path.read_bytes() for path in sorted((newest / "trainer").iterdir())}


def steps(directory: Path) -> list[str]:
    """The lines of a schedule, behind that of the recipe."""
    return (directory / "schedule.jsonl").read_text().splitlines()[1:]


def assert_equal(directory: Path, other: Path) -> None:
    assert read_metrics(directory) == read_metrics(other)
    assert weights(directory) == weights(other)
    assert rollouts(directory).equals(rollouts(other))
    assert steps(directory) == steps(other)


EXTRA = (*SLOW, "async.extra_prompts=4")
REFILLED = ("rollout.dynamic_sampling=true", "rollout.max_response_tokens=2", "rollout.max_refill_ratio=20")


@pytest.mark.parametrize(
    "options",
    [
        ahead(1, *LONG),
        ahead(3, *LONG),
        ahead(2, *LONG, "async.partial_rollouts=restart"),
        ahead(1, *REFILLED),
        ahead(0, *REFILLED),
    ],
)
def test_a_replay_is_the_run_that_it_is_of(run: Run, tmp_path: Path, options: tuple[str, ...]) -> None:
    first, again = tmp_path / "runs" / "first", tmp_path / "runs" / "again"
    run(*options, "run.name=first")
    progress = Watched()
    run(*options, "run.name=again", replay_schedule=first / "schedule.jsonl", progress=progress)
    assert not [note for note in progress.notes if "replay" in note]
    assert_equal(first, again)


@pytest.mark.parametrize("on_stale", ["drop", "rescore"])
def test_what_was_slow_is_dropped_or_rescored_again_in_no_time(
    run: Run, registry_with: Callable[..., Registry], tmp_path: Path, on_stale: str
) -> None:
    """Some answers came after a step's end; the replay's come at once."""
    first, again = tmp_path / "runs" / "first", tmp_path / "runs" / "again"
    options = (*ahead(0), *EXTRA, f"async.on_stale={on_stale}")
    run(*options, "run.name=first", registry=registry_with(environment=Slow), progress=CountsSteps())
    progress = Watched()
    Slow.steps_done = 10**6
    run(*options, "run.name=again", replay_schedule=first / "schedule.jsonl", progress=progress)
    assert not [note for note in progress.notes if "replay" in note]
    assert_equal(first, again)
    name = {"drop": "async/groups_dropped", "rescore": "async/tokens_rescored"}[on_stale]
    assert sum(record.get(name, 0.0) for record in read_metrics(again)) > 0


class Moody(FakeEnvironment):
    """Three turns; by the prompt's last letter it cannot begin, answers at random times or behind the first step, fails, or
    never answers."""

    is_patient = True

    async def reset(self, row: Row, seed: int) -> ResetResult:
        letter = str(row["prompt"])[-2]
        if letter in "ab" and seed:  # not where prompts are looked at before the run
            raise RuntimeError("cannot begin")
        return ResetResult(observation=Observation(text=str(row["prompt"])), state=(letter, 0))

    async def step(self, state: Any, turn: Turn) -> StepResult:
        letter, number = state
        if letter in "cd" and number == 1:
            raise RuntimeError("cannot go on")
        if self.is_patient:
            await asyncio.sleep(60 if letter in "ef" and number == len(turn.tokens) % 2 else random.random() / 200)
            while letter in "gh" and Slow.steps_done < 1:
                await asyncio.sleep(0.01)
        result = await super().step(number, turn)
        return evolve(result, state=(letter, number + 1))


MOODY = (
    *UNMEASURED,
    "environment.fake.num_turns=3",
    "logging.rollouts_every_n_steps=1",
    "rollout.episode_timeout_s=1",
    "rollout.max_failed_fraction=1",
    "rollout.max_response_tokens=60",
    "rollout.max_turn_tokens=12",
    "rollout.max_turns=3",
    "rollout.on_environment_error=mask",
    "rollout.samples_per_prompt=2",
    "run.num_steps=5",
)


def test_turns_failures_and_what_took_too_long_are_as_they_were(
    run: Run, registry_with: Callable[..., Registry], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second environment keeps nobody waiting and the replay waits for nobody, but for those that began and fail."""
    first, again = tmp_path / "runs" / "first", tmp_path / "runs" / "again"
    options = (*ahead(2), *MOODY)
    registry = registry_with(environment=Moody)
    run(*options, "run.name=first", registry=registry, progress=CountsSteps())
    progress = Watched()
    monkeypatch.setattr(Moody, "is_patient", False)
    run(*options, "run.name=again", replay_schedule=first / "schedule.jsonl", progress=progress, registry=registry)
    assert not [note for note in progress.notes if "replay" in note]
    assert_equal(first, again)
    records = [json.loads(line) for line in steps(first)]
    samples = [sample for record in records for group in record["groups"] for sample in group["samples"]]
    lost = [sample["lost"] for sample in samples if "lost" in sample]
    assert {one.get("timed_out", False) for one in lost} == {True, False}
    versions = [{version for turn in sample["turns"] for version, _ in turn} for sample in samples]
    assert max(map(len, versions)) > 1, "no episode went on behind a step's end"
    assert {len(sample["turns"]) for sample in samples} >= {0, 2, 3}


class Lengthy(FakeEnvironment):
    """Some prompts are too long, which shows where their episodes begin."""

    async def reset(self, row: Row, seed: int) -> ResetResult:
        text = str(row["prompt"])
        if text[-2] in "abcdefghij":
            await asyncio.sleep(random.random() / 100)
            text = text * 3 if seed else text
        return ResetResult(observation=Observation(text=text), state=0)


def test_rows_in_the_place_of_long_prompts_are_the_same_again(
    run: Run, registry_with: Callable[..., Registry], tmp_path: Path
) -> None:
    first, again = tmp_path / "runs" / "first", tmp_path / "runs" / "again"
    options = (*ahead(2), *LONG, *UNMEASURED, "data.train.on_long_prompt=drop")
    registry = registry_with(environment=Lengthy)
    run(*options, "run.name=first", registry=registry)
    progress = Watched()
    run(*options, "run.name=again", replay_schedule=first / "schedule.jsonl", progress=progress, registry=registry)
    assert not [note for note in progress.notes if note.startswith("replay")]
    assert any('"spare"' in line for line in steps(first))
    assert_equal(first, again)


@pytest.mark.parametrize("every", [1, 3])
def test_a_run_that_was_killed_and_resumed_is_replayed_as_one(run: Run, tmp_path: Path, every: int) -> None:
    first, again = tmp_path / "runs" / "first", tmp_path / "runs" / "again"
    options = ahead(2, *LONG, f"checkpoint.every_n_steps={every}")
    with pytest.raises(Killed):
        run(*options, "run.name=first", progress=Watched(4, kills=True))
    run(*options, "run.name=first", resume=True)
    assert [json.loads(line)["step"] for line in steps(first)] == list(range(1, 9))
    progress = Watched()
    run(*options, "run.name=again", replay_schedule=first / "schedule.jsonl", progress=progress)
    assert not [note for note in progress.notes if "replay" in note]
    assert_equal(first, again)


def test_a_replay_that_was_killed_goes_on_without_the_file(run: Run, tmp_path: Path) -> None:
    first, again = tmp_path / "runs" / "first", tmp_path / "runs" / "again"
    options = ahead(2, *LONG, "checkpoint.every_n_steps=1")
    run(*options, "run.name=first")
    with pytest.raises(Killed):
        run(*options, "run.name=again", replay_schedule=first / "schedule.jsonl", progress=Watched(4, kills=True))
    assert steps(again) == steps(first)[:4]
    run(*options, "run.name=again", resume=True)
    assert (set(prompts(again).values()), prompts(again).total()) == ({1}, 64)


def assert_no_longer(step: dict[str, Any], again: dict[str, Any]) -> None:
    """A step has the same groups, and no sample is longer than it was."""
    assert [group["number"] for group in step["groups"]] == [group["number"] for group in again["groups"]]
    lengths, lengths_again = (
        [
            sum(number for turn in sample["turns"] for _, number in turn)
            for group in one["groups"]
            for sample in group["samples"]
        ]
        for one in (step, again)
    )
    assert all(later <= before for before, later in zip(lengths, lengths_again, strict=True))


def test_a_replay_with_another_loss_says_from_where_on_it_is_another_run(run: Run, tmp_path: Path) -> None:
    first, again, third = (tmp_path / "runs" / name for name in ("first", "again", "third"))
    options = ahead(2, *LONG)
    run(*options, "run.name=first")
    others = (*options, "optimizer.learning_rate=2.0")
    progress = Watched()
    run(*others, "run.name=again", replay_schedule=first / "schedule.jsonl", progress=progress)
    (note,) = (note for note in progress.notes if note.startswith("replay"))
    # What was sampled before the first update is the same, whichever step trained on it.
    other = next(json.loads(line)["step"] for line, mine in zip(steps(first), steps(again), strict=True) if line != mine)
    assert note.startswith(f"replay, step {other}: ")
    assert 1 < other <= 4
    for line, mine in zip(steps(first), steps(again), strict=True):
        assert_no_longer(json.loads(line), json.loads(mine))
    run(*others, "run.name=third", replay_schedule=first / "schedule.jsonl")
    assert_equal(again, third)


class Unhurried(FakeGenerator):
    """Takes its time for each token, so that new weights come in the midst of samples."""

    def step(self, samples: RunningSamples) -> Int64Array:
        time.sleep(0.002)
        return super().step(samples)


def test_of_weights_that_came_in_flight_replays_equal_one_another(
    run: Run, registry_with: Callable[..., Registry], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What saw them in the middle of a turn is asked for in parts, which draw other tokens: a note says so."""
    first, again, third = (tmp_path / "runs" / name for name in ("first", "again", "third"))
    options = (*ahead(2), *LONG, *UNMEASURED)
    monkeypatch.setattr(RunPlan, "overlaps", True)  # as with devices of their own, in one process
    run(*options, "run.name=first", registry=registry_with(generator=Unhurried))
    in_flight = ['"in_flight":true' in line for line in steps(first)]
    assert any(in_flight)
    for replay in (again, third):
        progress = Watched()
        run(*options, f"run.name={replay.name}", replay_schedule=first / "schedule.jsonl", progress=progress)
        (note,) = (note for note in progress.notes if note.startswith("replay"))
        assert note.startswith(f"replay, step {in_flight.index(True) + 1}: ")
    assert_equal(again, third)
    for line, other in zip(steps(first), steps(again), strict=True):
        assert_no_longer(json.loads(line), json.loads(other))


def test_a_run_is_not_replayed_into_its_own_directory(run: Run, tmp_path: Path) -> None:
    run(*ahead(1))
    with pytest.raises(CheckpointError, match="run.name"):
        run(*ahead(1), replay_schedule=tmp_path / "runs" / "run" / "schedule.jsonl")
    with pytest.raises(ConfigError, match="--resume"):
        run(*ahead(1), replay_schedule=tmp_path / "runs" / "run" / "schedule.jsonl", resume=True)


def test_restarted_samples_see_no_weights_in_flight(
    run: Run, registry_with: Callable[..., Registry], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, again = (tmp_path / "runs" / name for name in ("first", "again"))
    options = (*ahead(2), *LONG, *UNMEASURED, "async.partial_rollouts=restart", "run.num_steps=4")
    monkeypatch.setattr(RunPlan, "overlaps", True)
    run(*options, "run.name=first", registry=registry_with(generator=Unhurried))
    assert not [line for line in steps(first) if '"in_flight":true' in line]
    progress = Watched()
    run(*options, "run.name=again", replay_schedule=first / "schedule.jsonl", progress=progress)
    assert not [note for note in progress.notes if note.startswith("replay")]
    assert_equal(first, again)


@pytest.mark.parametrize(
    "order", ["prompt_weights=learnability", "prompt_weights=learning_progress", "zero_variance_weight=0.2"]
)
@pytest.mark.parametrize("options", [ahead(2), ahead(1, *REFILLED)], ids=["ahead", "refilled"])
def test_a_replay_takes_the_prompts_that_the_run_chose(run: Run, tmp_path: Path, order: str, options: tuple[str, ...]) -> None:
    first, again = tmp_path / "runs" / "first", tmp_path / "runs" / "again"
    options = (*options, f"data.{order}", "environment.fake.num_train_rows=24", "checkpoint.every_n_steps=1")
    with pytest.raises(Killed):
        run(*options, "run.name=first", progress=Watched(4, kills=True))
    run(*options, "run.name=first", resume=True)
    progress = Watched()
    run(*options, "run.name=again", replay_schedule=first / "schedule.jsonl", progress=progress)
    assert not [note for note in progress.notes if "replay" in note]
    assert_equal(first, again)
    plain = tmp_path / "runs" / "plain"
    run(*[option for option in options if not option.startswith("data.")], "run.name=plain")
    assert prompts(plain) != prompts(first)
