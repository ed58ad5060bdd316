"""Which rows and draws each step and each evaluation has."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas
import pytest

from rlcore.run.data.seeds import Stream
from rlcore.run.rollout import sources, step_collector
from rlcore.run.rollout.episode_starts import StepPlan
from rlcore.spi import (
    EnvironmentContext,
    Row,
)
from rlcore.testing.fakes.environment import FakeEnvironment, FakeEnvironmentConfig

Run = Callable[..., dict[str, Any]]


def collected_rows(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[list[str]]]:
    """The prompts of every step and of every evaluation, by purpose."""
    found: dict[int, list[list[str]]] = {Stream.ROLLOUTS: [], Stream.EVALUATION: []}

    def record(purpose: Stream) -> Callable[..., StepPlan]:
        def recorded(*, rows: Sequence[Row], **others: Any) -> StepPlan:
            found[purpose].append([str(row["prompt"]) for row in rows])
            return StepPlan(rows=rows, **others)

        return recorded

    monkeypatch.setattr(sources, "StepPlan", record(Stream.ROLLOUTS))
    monkeypatch.setattr(step_collector, "StepPlan", record(Stream.EVALUATION))
    return found


def test_training_and_evaluation_see_their_own_rows_alone(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    found = collected_rows(monkeypatch)
    run("run.num_steps=12")
    environment = FakeEnvironment(EnvironmentContext(seed=0), FakeEnvironmentConfig())
    own = {split: {str(row["prompt"]) for row in environment.rows(split) or ()} for split in ("train", "evaluation")}
    assert {prompt for rows in found[Stream.ROLLOUTS] for prompt in rows} == own["train"]
    assert [set(rows) for rows in found[Stream.EVALUATION]] == [own["evaluation"]] * 4


def test_no_two_steps_draw_alike(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = collected_rows(monkeypatch)
    # Every step has all prompts, and weights that hardly change: only the draws can differ.
    run("run.num_steps=3", "training.prompts_per_step=64", "optimizer.learning_rate=1e-12", "logging.rollouts_every_n_steps=1")
    steps = found[Stream.ROLLOUTS]
    assert [sorted(rows) for rows in steps] == [sorted(steps[0])] * 3
    assert steps[0] != steps[1] != steps[2]
    files = sorted((tmp_path / "runs" / "run" / "rollouts").glob("step-*.parquet"))
    responses = [pandas.read_parquet(file).groupby("prompt")["response"].apply(tuple).to_dict() for file in files]
    assert all(responses[0][prompt] != responses[1][prompt] for prompt in responses[0])
