"""Environments that fail now and then, or always."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas
import pytest
from attrs import evolve, frozen

from rlcore.registry.discovery import Registry
from rlcore.run.report.progress import Progress
from rlcore.spi import EnvironmentContext, Observation, ResetResult, RewardError, Row, StepResult, Turn, capabilities
from rlcore.testing.fakes import fake_registry
from rlcore.testing.fakes.environment import FakeEnvironment, FakeEnvironmentConfig
from rlcore.testing.fakes.providers import FAKE_ENVIRONMENT

from ..core.run.conftest import read_metrics  # type: ignore[import-not-found]

Run = Callable[..., dict[str, Any]]


@frozen(kw_only=True)
class BrokenConfig(FakeEnvironmentConfig):
    """`[environment.fake]`"""

    failing: str = ""
    """Answers that begin with one of these letters raise; with an a among them, all prompts do."""


class Broken(FakeEnvironment):
    """Its `reset` is not cheap, so no one looks at its prompts before the run."""

    config: BrokenConfig

    def __init__(self, context: EnvironmentContext, config: BrokenConfig) -> None:
        super().__init__(context, config)

    async def reset(self, row: Row, seed: int) -> ResetResult:
        if self.config.failing.startswith("a"):
            raise KeyError("answer")
        return await super().reset(row, seed)

    async def step(self, state: Any, turn: Turn) -> StepResult:
        if turn.text[:1] in tuple(self.config.failing):
            raise ConnectionError(f"no judge\nfor {turn.text}")
        return await super().step(state, turn)


@pytest.fixture
def broken() -> Registry:
    return registry_of("Broken")


def registry_of(environment: str) -> Registry:
    """The fakes, with an environment of this module."""
    capable = FAKE_ENVIRONMENT.capabilities - {capabilities.CHEAP_RESET}
    provider = evolve(FAKE_ENVIRONMENT, config=BrokenConfig, backend=f"{__name__}:{environment}", capabilities=capable)
    others = tuple(entry for entry in fake_registry().entries if entry.role != "environment")
    return evolve(fake_registry(), entries=(*others, *Registry.from_providers({"environment": [provider]}).entries))


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def progress(notes: list[str]) -> Progress:
    progress = Progress()
    progress.note = notes.append  # type: ignore[method-assign]
    return progress


MASK = ("rollout.on_environment_error=mask", "run.num_steps=2", "evaluation.at_start=false", "evaluation.at_end=false")
EVERYTHING = "environment.fake.failing=abcdefghijklmnopqrstuvwxyz .:?"


def test_an_environment_that_always_fails_ends_a_run_that_masks(run: Run, broken: Registry, tmp_path: Path) -> None:
    with pytest.raises(RewardError) as raised:
        run(*MASK, EVERYTHING, registry=broken)
    assert str(raised.value) == (
        "the environment failed on 64 of 64 samples of the step: 64 x raised KeyError: 'answer'. That is more than "
        "rollout.max_failed_fraction = 0.5 of them. Repair the environment or the data, or raise it"
    )
    assert not (tmp_path / "runs" / "run" / "metrics.jsonl").exists()


def test_it_goes_on_where_the_recipe_lets_all_fail(run: Run, broken: Registry, tmp_path: Path) -> None:
    run(*MASK, EVERYTHING, "rollout.max_failed_fraction=1.0", registry=broken)
    assert [record["environment/failed"] for record in read_metrics(tmp_path / "runs" / "run")] == [64, 64]


@pytest.mark.parametrize("options", [(), ("rollout.dynamic_sampling=true", "rollout.max_refill_ratio=50")])
def test_failures_below_the_bound_are_said_with_reason_and_count(
    run: Run, broken: Registry, progress: Progress, notes: list[str], tmp_path: Path, options: tuple[str, ...]
) -> None:
    """Of the samples that are trained on, whatever was replaced beside them."""
    run(*MASK, *options, "environment.fake.failing=opqrst", registry=broken, progress=progress)
    records = read_metrics(tmp_path / "runs" / "run")
    said = [note for note in notes if note.startswith("the environment failed on ")]
    assert len(said) == len(records) == 2
    for note, record in zip(said, records, strict=True):
        assert 0 < record["environment/failed"] <= 32
        assert note.startswith(f"the environment failed on {record['environment/failed']:.0f} of 64 samples of the step: ")
        assert " x raised ConnectionError: no judge" in note
        assert "\n" not in note


def test_an_evaluation_that_fails_is_no_success_rate(run: Run, broken: Registry) -> None:
    with pytest.raises(RewardError, match=r"16 of 16 samples .* rollout\.max_failed_fraction = 0\.5"):
        run(*MASK, EVERYTHING, "evaluation.at_start=true", registry=broken)


class Doomed(FakeEnvironment):
    """Two turns. An episode whose first answer begins with one of the letters is lost in the second; all others are solved."""

    config: BrokenConfig

    def __init__(self, context: EnvironmentContext, config: BrokenConfig) -> None:
        super().__init__(context, config)

    async def step(self, state: Any, turn: Turn) -> StepResult:
        if state == "lost":
            raise TimeoutError("no judge")
        if state == "kept":
            return StepResult(reward=1.0, done=True, success=True)
        lost = turn.text[:1] in tuple(self.config.failing)
        more = Observation(text=" again:")
        metrics = {"lost": float(lost), **({"only_of_lost": 1.0} if lost else {})}
        return StepResult(reward=0.5, done=False, observation=more, state="lost" if lost else "kept", metrics=metrics)


@pytest.fixture
def doomed() -> Registry:
    return registry_of("Doomed")


TURNS = (*MASK, "rollout.max_turns=2", "rollout.max_response_tokens=1000", "logging.rollouts_every_n_steps=1")


def test_an_episode_that_fails_in_its_last_turn_counts_in_no_figure_of_the_training_samples(
    run: Run, doomed: Registry, tmp_path: Path
) -> None:
    run(*TURNS, "evaluation.at_start=true", "evaluation.temperature=1.0", "environment.fake.failing=nopqrst", registry=doomed)
    records = read_metrics(tmp_path / "runs" / "run")
    for record in records[1:]:
        assert record["environment/failed"] > 0
        assert record["environment/lost"] == 0.0
        assert "environment/only_of_lost" not in record
        assert record["success_rate"] == 1.0
        assert record["reward_mean"] == 1.5
    assert 0.0 < records[0]["eval/pass@1"] < 1.0, "what fails is not solved"
    assert records[0]["eval/failed"] == 16 * (1.0 - records[0]["eval/pass@1"])
    assert records[0]["eval/reward_mean"] == 1.5


def test_an_episode_that_fails_changes_no_sample_of_the_others(run: Run, broken: Registry, tmp_path: Path) -> None:
    """Such as one that takes too long on a busy machine, and is missing in the second turn."""
    tables = {}
    for name, failing in (("all", ""), ("some", "pqrst")):
        options = (f"run.name={name}", "run.num_steps=1", f"environment.fake.failing={failing!r}")
        run(*TURNS, *options, "environment.fake.num_turns=2", registry=broken)
        tables[name] = pandas.read_parquet(tmp_path / "runs" / name / "rollouts" / "step-000001.parquet")
    valid = tables["some"]["valid"]
    assert 8 < valid.sum() < 64
    assert list(tables["some"]["response"][valid]) == list(tables["all"]["response"][valid])
