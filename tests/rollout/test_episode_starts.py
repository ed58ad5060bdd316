"""Prompts that only the beginning of an episode shows to be too long: others take their places, or they are an error."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas
import pytest
from attrs import evolve, frozen
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlcore.registry.discovery import Registry
from rlcore.run.report.progress import Progress
from rlcore.spi import DataError, EnvironmentContext, Observation, ResetResult, Row, capabilities
from rlcore.testing.fakes import fake_registry
from rlcore.testing.fakes.environment import FakeEnvironment, FakeEnvironmentConfig
from rlcore.testing.fakes.providers import FAKE_ENVIRONMENT
from rlcore_rollout.step_plans import Draws, PromptLimit, StepBatch, StepPlan

from ..core.run.conftest import read_metrics  # type: ignore[import-not-found]

Run = Callable[..., dict[str, Any]]

LONG = ("environment.fake.long=abcdefgh", "data.train.shuffle=false", "run.num_steps=3")
DROP = ("data.train.on_long_prompt=drop", "data.evaluation.on_long_prompt=drop", "logging.rollouts_every_n_steps=1")
UNMEASURED = ("evaluation.at_start=false", "evaluation.at_end=false", "evaluation.every_n_steps=0")


@frozen(kw_only=True)
class LongConfig(FakeEnvironmentConfig):
    """`[environment.fake]`"""

    long: str = ""
    """Prompts that begin with one of these letters are long once an episode begins."""


class LongPrompts(FakeEnvironment):
    """Its `reset` is not cheap, so no one looks at its prompts before the run. They begin with a, b, c, ..., z, aa, ab, ..."""

    config: LongConfig

    def __init__(self, context: EnvironmentContext, config: LongConfig) -> None:
        super().__init__(context, config)

    async def reset(self, row: Row, seed: int) -> ResetResult:
        longer = 10 if row["prompt"][0] in self.config.long else 1
        return ResetResult(observation=Observation(text=row["prompt"] * longer), state=0)


@pytest.fixture(scope="module")
def registry() -> Registry:
    """The fakes, with the environment above."""
    capable = FAKE_ENVIRONMENT.capabilities - {capabilities.CHEAP_RESET}
    provider = evolve(FAKE_ENVIRONMENT, config=LongConfig, backend=f"{__name__}:LongPrompts", capabilities=capable)
    others = tuple(entry for entry in fake_registry().entries if entry.role != "environment")
    return evolve(fake_registry(), entries=(*others, *Registry.from_providers({"environment": [provider]}).entries))


class Watched(Progress):
    """Keeps the notes; ends the process's work, as a kill would, once a step's metrics are written."""

    def __init__(self, killed_after: int = -1) -> None:
        self.killed_after = killed_after
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == self.killed_after:
            raise Killed


class Killed(BaseException):
    """Nothing handles it, as nothing handles a kill."""


def rollouts(run_directory: Path, step: int) -> pandas.DataFrame:
    return pandas.read_parquet(run_directory / "rollouts" / f"step-{step:06d}.parquet")


def letters(table: pandas.DataFrame) -> str:
    """What the prompts of a step begin with, in order."""
    return "".join(prompt[0] for prompt in table.groupby("group")["prompt"].first())


def test_the_next_rows_take_the_places_of_long_prompts(run: Run, registry: Registry, tmp_path: Path) -> None:
    progress = Watched()
    options = ("training.prompts_per_step=16", "run.num_steps=1", "environment.fake.long=acdefghr")
    run(*LONG, *DROP, *options, registry=registry, progress=progress)
    table = rollouts(tmp_path / "runs" / "run", 1)
    assert letters(table) == "qbxstuvwijklmnop"
    assert len(table) == 16 * 8
    left_out = "8 prompts are left out: they have more than 16 tokens (rollout.max_prompt_tokens); the step has 16 of 16"
    assert f"data.train: {left_out}" in progress.notes


def test_a_step_whose_prompts_are_all_too_long_takes_others(run: Run, registry: Registry, tmp_path: Path) -> None:
    run(*LONG, *DROP, *UNMEASURED, "training.prompts_per_step=1", "training.minibatches_per_step=1", registry=registry)
    assert [letters(rollouts(tmp_path / "runs" / "run", step)) for step in (1, 2, 3)] == ["i"] * 3
    assert [record["updates"] for record in read_metrics(tmp_path / "runs" / "run")] == [1.0] * 3


def test_a_step_has_fewer_prompts_where_no_others_fit(run: Run, registry: Registry, tmp_path: Path) -> None:
    progress = Watched()
    few = ("environment.fake.num_train_rows=6", "environment.fake.long=abcde", "run.num_steps=1")
    run(*LONG, *DROP, *UNMEASURED, *few, registry=registry, progress=progress)
    assert letters(rollouts(tmp_path / "runs" / "run", 1)) == "ff"
    assert any(note.startswith("data.train: 12 prompts are left out") for note in progress.notes)
    assert any(note.endswith("; the step has 2 of 8") for note in progress.notes)


def test_held_out_prompts_are_left_out_and_not_replaced(run: Run, registry: Registry) -> None:
    """They begin with b and c."""
    progress = Watched()
    run(*DROP, "environment.fake.long=b", "run.num_steps=1", registry=registry, progress=progress)
    (note, *_) = [note for note in progress.notes if note.startswith("data.evaluation: ")]
    assert note.endswith("; the evaluation has 2 of 16")


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    long=st.sets(st.sampled_from("acdefghijklmnopqrstuvwxyz"), min_size=8),
    prompts_per_step=st.integers(1, 9),
    killed_after=st.integers(1, 4),
)
def test_a_resumed_run_leaves_out_and_takes_what_an_undisturbed_one_does(
    run: Run, registry: Registry, tmp_path: Path, long: set[str], prompts_per_step: int, killed_after: int
) -> None:
    options = (
        *DROP,
        f"environment.fake.long={''.join(sorted(long))}",
        f"training.prompts_per_step={prompts_per_step}",
        "training.minibatches_per_step=1",
        "run.num_steps=4",
        "evaluation.every_n_steps=2",
        "checkpoint.every_n_steps=1",
    )
    whole, killed = (f"{''.join(sorted(long))}-{prompts_per_step}-{name}" for name in ("whole", killed_after))
    if not (tmp_path / "runs" / whole).exists():
        run(*options, f"run.name={whole}", registry=registry)
    if (tmp_path / "runs" / killed).exists():  # hypothesis tries an example again
        return
    with pytest.raises(Killed):
        run(*options, f"run.name={killed}", registry=registry, progress=Watched(killed_after))
    run(*options, f"run.name={killed}", resume=True, registry=registry)
    assert read_metrics(tmp_path / "runs" / killed) == read_metrics(tmp_path / "runs" / whole)
    for step in range(1, 5):
        table = rollouts(tmp_path / "runs" / killed, step)
        assert len(letters(table)) == prompts_per_step
        assert not long & set(letters(table))
        pandas.testing.assert_frame_equal(table, rollouts(tmp_path / "runs" / whole, step))


def test_a_group_that_is_given_up_is_waited_for_no_longer() -> None:
    """Rows take the places of long prompts once it is known which are; of what is given up it never is."""
    rows = [{"prompt": name} for name in "abcde"]
    plan = StepPlan(rows=rows[:4], draws=Draws([0], 4, 1), spare=iter(rows[4:]))
    step_batch = StepBatch(plan=plan, limit=PromptLimit(max_tokens=2, drops=True, key="data.train"), num_unknown=4)
    assert step_batch.begun() == {}
    assert step_batch.too_long(1, rows[1], 9) == {}
    assert step_batch.too_long(2, rows[2], 9) == {}
    step_batch.give_up(1)  # which waits for a row itself
    step_batch.give_up(3)  # the last that was not known
    assert step_batch.resolve() == {2: rows[4]}


def test_a_prompt_that_is_left_out_changes_no_sample_of_the_others(run: Run, registry: Registry, tmp_path: Path) -> None:
    """An episode that cannot begin today, so that no one sees how long its prompt is, does so tomorrow."""
    responses = []
    for name, long in (("none", ""), ("first", "a")):
        options = (*UNMEASURED, "run.num_steps=1", f"environment.fake.long={long!r}", f"run.name={name}")
        run(*LONG, *DROP, *options, registry=registry)
        table = rollouts(tmp_path / "runs" / name, 1)
        responses.append(table.groupby("prompt")["response"].apply(tuple).to_dict())
        assert letters(table) == ("i" if long else "a") + "bcdefgh"
    assert len(responses[0].items() & responses[1].items()) == 7


def test_long_prompts_are_an_error_where_the_recipe_does_not_drop_them_or_there_are_no_others(
    run: Run, registry: Registry
) -> None:
    with pytest.raises(DataError, match=r'data\.train: the environment.*data\.train\.on_long_prompt = "drop"'):
        run(*LONG, *UNMEASURED, registry=registry)
    every = (*LONG, *DROP, "environment.fake.long=abcdefghijklmnopqrstuvwxyz", "environment.fake.num_train_rows=20")
    with pytest.raises(DataError, match=r"data\.train: all 28 prompts"):
        run(*every, *UNMEASURED, "run.name=all", registry=registry)
    with pytest.raises(DataError, match=r"data\.evaluation: all 16 prompts"):
        run(*every, "run.name=held-out", registry=registry)
