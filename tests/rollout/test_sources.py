"""Which rows and draws each step and each evaluation has."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas
import pytest
from attrs import evolve

from rlcore.run.data.prompt_stream import RandomPurpose
from rlcore.spi import (
    ConfigError,
    EnvironmentContext,
    ResetResult,
    RewardError,
    Row,
    StepResult,
    Turn,
)
from rlcore.testing.fakes.environment import FakeEnvironment, FakeEnvironmentConfig
from rlcore_rollout import sampler, sources
from rlcore_rollout.step_plans import StepPlan

from ..core.run.conftest import read_metrics  # type: ignore[import-not-found]

Run = Callable[..., dict[str, Any]]


def collected_rows(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[list[str]]]:
    """The prompts of every step and of every evaluation, by purpose."""
    found: dict[int, list[list[str]]] = {RandomPurpose.ROLLOUTS: [], RandomPurpose.EVALUATION: []}

    def record(purpose: RandomPurpose) -> Callable[..., StepPlan]:
        def recorded(*, rows: Sequence[Row], **others: Any) -> StepPlan:
            found[purpose].append([str(row["prompt"]) for row in rows])
            return StepPlan(rows=rows, **others)

        return recorded

    monkeypatch.setattr(sources, "StepPlan", record(RandomPurpose.ROLLOUTS))
    monkeypatch.setattr(sampler, "StepPlan", record(RandomPurpose.EVALUATION))
    return found


def test_training_and_evaluation_see_their_own_rows_alone(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    found = collected_rows(monkeypatch)
    run("run.num_steps=12")
    environment = FakeEnvironment(EnvironmentContext(seed=0), FakeEnvironmentConfig())
    own = {split: {str(row["prompt"]) for row in environment.rows(split) or ()} for split in ("train", "evaluation")}
    assert {prompt for rows in found[RandomPurpose.ROLLOUTS] for prompt in rows} == own["train"]
    assert [set(rows) for rows in found[RandomPurpose.EVALUATION]] == [own["evaluation"]] * 4


def test_no_two_steps_draw_alike(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = collected_rows(monkeypatch)
    # Every step has all prompts, and weights that hardly change: only the draws can differ.
    run("run.num_steps=3", "training.prompts_per_step=64", "optimizer.learning_rate=1e-12", "logging.rollouts_every_n_steps=1")
    steps = found[RandomPurpose.ROLLOUTS]
    assert [sorted(rows) for rows in steps] == [sorted(steps[0])] * 3
    assert steps[0] != steps[1] != steps[2]
    files = sorted((tmp_path / "runs" / "run" / "rollouts").glob("step-*.parquet"))
    responses = [pandas.read_parquet(file).groupby("prompt")["response"].apply(tuple).to_dict() for file in files]
    assert all(responses[0][prompt] != responses[1][prompt] for prompt in responses[0])


@pytest.mark.parametrize("refill", ["false", "true"])
def test_prompts_whose_environment_failed_come_as_often_as_before(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, refill: str
) -> None:
    """Of some prompts no sample ever has a reward; of the others the rewards differ."""

    async def reset(environment: FakeEnvironment, row: Row, seed: int) -> ResetResult:
        found = await begin(environment, row, seed)
        return evolve(found, state=None) if row["prompt"] in failing else found

    async def step(environment: FakeEnvironment, state: int | None, turn: Turn) -> StepResult:
        if state is None:
            raise RewardError("away")
        return evolve(await answer(environment, state, turn), reward=float(sum(map(ord, turn.text))))

    begin, answer = FakeEnvironment.reset, FakeEnvironment.step
    rows = FakeEnvironment(EnvironmentContext(seed=0), FakeEnvironmentConfig(num_train_rows=16)).rows("train") or ()
    failing = {row["prompt"] for row in rows[::5]}
    monkeypatch.setattr(FakeEnvironment, "reset", reset)
    monkeypatch.setattr(FakeEnvironment, "step", step)
    masked = ("rollout.on_environment_error=mask", "rollout.max_failed_fraction=1.0", "environment.fake.num_train_rows=16")
    refilled = (f"rollout.dynamic_sampling={refill}", *(["rollout.max_refill_ratio=50"] if refill == "true" else []))
    run(*masked, *refilled, "data.zero_variance_weight=0.01", "rollout.samples_per_prompt=16", "optimizer.learning_rate=1e-9")
    records = read_metrics(tmp_path / "runs" / "run")
    assert [record["data/zero_variance_prompts"] for record in records[1:]] == [0.0] * 6


def test_rows_of_higher_levels_come_once_lower_ones_are_solved_and_a_resumed_run_goes_on_alike(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def step(environment: FakeEnvironment, state: int, turn: Turn) -> StepResult:
        return evolve(await answer(environment, state, turn), success=True)

    def rows(environment: FakeEnvironment, split: str) -> Sequence[Row]:
        return [{**row, "level": number // 16} for number, row in enumerate(own(environment, split) or ())]

    answer, own = FakeEnvironment.step, FakeEnvironment.rows
    monkeypatch.setattr(FakeEnvironment, "step", step)
    monkeypatch.setattr(FakeEnvironment, "rows", rows)
    made = rows(FakeEnvironment(EnvironmentContext(seed=0), FakeEnvironmentConfig()), "train")
    level_of = {str(row["prompt"]): int(row["level"]) for row in made}
    options = ("data.curriculum_threshold=1.0", "data.level_window=6", "evaluation.every_n_steps=0")
    whole = collected_rows(monkeypatch)[RandomPurpose.ROLLOUTS]
    run(*options, "run.num_steps=12", "run.name=whole")
    levels = [int(record["data/level"]) for record in read_metrics(tmp_path / "runs" / "whole") if "data/level" in record]
    assert len(levels) == 12
    assert levels == sorted(levels)
    assert {0, 3} <= set(levels)
    for level, prompts in zip(levels, whole, strict=True):
        assert max(level_of[prompt] for prompt in prompts) <= level
    parts = collected_rows(monkeypatch)[RandomPurpose.ROLLOUTS]
    run(*options, "run.num_steps=3", "checkpoint.every_n_steps=3")
    run(*options, "run.num_steps=12", "checkpoint.every_n_steps=3", resume=True)
    assert parts == whole


def test_levels_need_groups_that_all_count(prepared: Callable[..., Any]) -> None:
    options = ("rollout.dynamic_sampling=true", "algorithm.fake.source=demonstrations", "data.zero_variance_weight=0.5")
    for option in options:
        with pytest.raises(ConfigError, match=r"data\.curriculum_threshold: found 0\.5, with "):
            prepared("data.curriculum_threshold=0.5", option)
    with pytest.raises(ConfigError, match=r"data\.level_window: found 8, without"):
        prepared("data.level_window=8")
