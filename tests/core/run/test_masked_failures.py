"""Environments that fail now and then, or always, and prompts that only the beginning of an episode shows to be too long."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas
import pytest
from attrs import evolve, frozen

from rlcore.plugins.discovery import Registry
from rlcore.run.progress import SilentProgress
from rlcore.spi import DataError, EnvironmentContext, Observation, ResetResult, RewardError, Row, StepResult, Turn, capabilities
from rlcore.testing.fakes import fake_registry
from rlcore.testing.fakes.environment import FakeEnvironment, FakeEnvironmentConfig
from rlcore.testing.fakes.providers import FAKE_ENVIRONMENT

from .conftest import read_metrics  # type: ignore[import-not-found]

Run = Callable[..., dict[str, Any]]


@frozen(kw_only=True)
class BrokenConfig(FakeEnvironmentConfig):
    """`[environment.fake]`"""

    failing: str = ""
    """Answers that begin with one of these letters raise; with an a among them, all prompts do."""
    long: str = ""
    """Prompts that begin with one of these letters are long once an episode begins."""


class Broken(FakeEnvironment):
    """Its `reset` is not cheap, so no one looks at its prompts before the run."""

    config: BrokenConfig

    def __init__(self, context: EnvironmentContext, config: BrokenConfig) -> None:
        super().__init__(context, config)

    async def reset(self, row: Row, seed: int) -> ResetResult:
        if self.config.failing.startswith("a"):
            raise KeyError("answer")
        longer = 10 if row["prompt"][0] in self.config.long else 1
        return ResetResult(observation=Observation(text=row["prompt"] * longer), state=0)

    async def step(self, state: Any, turn: Turn) -> StepResult:
        if turn.text[:1] in tuple(self.config.failing):
            raise ConnectionError(f"no judge\nfor {turn.text}")
        return await super().step(state, turn)


@pytest.fixture
def broken() -> Registry:
    capable = FAKE_ENVIRONMENT.capabilities - {capabilities.CHEAP_RESET}
    provider = evolve(FAKE_ENVIRONMENT, config=BrokenConfig, backend=f"{__name__}:Broken", capabilities=capable)
    others = tuple(entry for entry in fake_registry().entries if entry.role != "environment")
    return evolve(fake_registry(), entries=(*others, *Registry.from_providers({"environment": [provider]}).entries))


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def progress(notes: list[str]) -> SilentProgress:
    progress = SilentProgress()
    progress.note = notes.append  # type: ignore[method-assign]
    return progress


MASK = ("rollout.on_environment_error=mask", "run.num_steps=2", "evaluation.at_start=false", "evaluation.at_end=false")
EVERYTHING = "environment.fake.failing=abcdefghijklmnopqrstuvwxyz .:?"


def test_an_environment_that_always_fails_ends_a_run_that_masks(run: Run, broken: Registry, tmp_path: Path) -> None:
    with pytest.raises(RewardError) as raised:
        run(*MASK, EVERYTHING, registry=broken)
    assert str(raised.value) == (
        "the environment failed on 64 of 64 samples: 64 x raised KeyError: 'answer'. That is more than "
        "rollout.max_failed_fraction = 0.5 of them. Repair the environment or the data, or raise it"
    )
    assert not (tmp_path / "runs" / "run" / "metrics.jsonl").exists()


def test_it_goes_on_where_the_recipe_lets_all_fail(run: Run, broken: Registry, tmp_path: Path) -> None:
    run(*MASK, EVERYTHING, "rollout.max_failed_fraction=1.0", registry=broken)
    assert [record["environment/failed"] for record in read_metrics(tmp_path / "runs" / "run")] == [64, 64]


def test_failures_below_the_bound_are_said_with_reason_and_count(
    run: Run, broken: Registry, progress: SilentProgress, notes: list[str], tmp_path: Path
) -> None:
    run(*MASK, "environment.fake.failing=opqrst", registry=broken, progress=progress)
    records = read_metrics(tmp_path / "runs" / "run")
    said = [note for note in notes if note.startswith("the environment failed on ")]
    assert len(said) == len(records) == 2
    for note, record in zip(said, records, strict=True):
        assert 0 < record["environment/failed"] <= 32
        assert note.startswith(f"the environment failed on {record['environment/failed']:.0f} of 64 samples: ")
        assert " x raised ConnectionError: no judge" in note
        assert "\n" not in note


def test_an_evaluation_that_fails_is_no_success_rate(run: Run, broken: Registry) -> None:
    with pytest.raises(RewardError, match=r"failed on 16 of 16 samples"):
        run(*MASK, EVERYTHING, "evaluation.at_start=true", registry=broken)


LONG = ("environment.fake.long=abcdefgh", "data.train.shuffle=false", "run.num_steps=8")


def test_prompts_that_an_episode_shows_to_be_long_are_dropped(
    run: Run, broken: Registry, progress: SilentProgress, notes: list[str], tmp_path: Path
) -> None:
    """The fake's prompts begin with a, b, c, ..., z, aa, ab, ...: eight a step."""
    drop = "data.evaluation.on_long_prompt=drop"
    once = "logging.rollouts_every_n_steps=1"
    everywhere = ("data.train.on_long_prompt=drop", drop, "training.prompts_per_step=16", once)
    run(*LONG, *everywhere, "run.num_steps=1", "environment.fake.long=acdefgh", registry=broken, progress=progress)
    table = pandas.read_parquet(tmp_path / "runs" / "run" / "rollouts" / "step-000001.parquet")
    assert {prompt[0] for prompt in table["prompt"]} == set("bijklmnop")
    assert len(table) == 9 * 8
    assert "7 of 16 prompts are left out: they have more than 16 tokens (rollout.max_prompt_tokens)" in notes


def test_they_are_an_error_where_the_recipe_does_not_drop_them(run: Run, broken: Registry) -> None:
    with pytest.raises(DataError, match=r'data\.train: the environment.*data\.train\.on_long_prompt = "drop"'):
        run(*LONG, "evaluation.at_start=false", registry=broken)
    with pytest.raises(DataError, match=r"data\.train: all 8 prompts asked for are over the limit"):
        run(*LONG, "evaluation.at_start=false", "run.name=all", "data.train.on_long_prompt=drop", registry=broken)
