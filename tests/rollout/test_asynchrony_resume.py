"""Runs ahead of their training that are resumed: by another recipe too, nothing is lost, repeated or waited for in vain."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlcore.registry.discovery import Registry
from rlcore.spi import ResetResult, Row
from rlcore.testing.fakes.environment import FakeEnvironment

from ..core.run.conftest import read_metrics  # type: ignore[import-not-found]
from .test_asynchrony import SLOW, CountsSteps, Killed, Slow, Watched, ahead, prompts, rollouts  # type: ignore[import-not-found]

Run = Callable[..., dict[str, Any]]
SAVED = ("run.num_steps=5", "checkpoint.every_n_steps=1", "evaluation.at_start=false", "evaluation.every_n_steps=0")
TWO_TURNS = ("rollout.max_turns=2", "environment.fake.num_turns=2")
LONG = ("rollout.max_response_tokens=60", "rollout.samples_per_prompt=2")


def killed(run: Run, *options: str, step: int = 2, **others: Any) -> None:
    with pytest.raises(Killed):
        run(*options, progress=Watched(step, kills=True), **others)


def require_each_prompt_once(directory: Path, number: int = 40) -> None:
    assert set(prompts(directory).values()) == {1}
    assert prompts(directory).total() == number


@pytest.mark.parametrize(
    "changed",
    [
        ("rollout.samples_per_prompt=4",),
        ("rollout.max_response_tokens=20",),
        ("rollout.max_turns=3", "environment.fake.num_turns=3"),
        ("async.max_staleness=0",),
        ("async.max_staleness=1",),
        ("async.max_staleness=3",),
        ("async.on_stale=drop",),
        ("async.on_stale=rescore", "async.extra_prompts=3"),
        ("async.partial_rollouts=restart",),
        ("rollout.dynamic_sampling=true",),
    ],
    ids=lambda changed: changed[0],
)
def test_what_another_recipe_began_is_gone_on_with(run: Run, tmp_path: Path, changed: tuple[str, ...]) -> None:
    options = ahead(2, *SAVED, *LONG)
    killed(run, *options)
    run(*options, *changed, resume=True)
    require_each_prompt_once(tmp_path / "runs" / "run")


@pytest.mark.parametrize(
    ("changed", "begins_again"),
    [
        ((), False),
        (("rollout.temperature=0.5",), True),
        (("rollout.accept_truncation_bias=true",), True),
    ],
    ids=lambda changed: changed[0] if changed and isinstance(changed, tuple) else None,
)
def test_what_was_sampled_otherwise_is_not_trained_on(
    run: Run, tmp_path: Path, changed: tuple[str, ...], begins_again: bool
) -> None:
    options = ahead(2, *SAVED, *LONG, "rollout.top_p=0.9", "algorithm.fake.generation_ratio=true")
    killed(run, *options)
    resumed = Watched()
    run(*options, *changed, resume=True, progress=resumed)
    assert any("another temperature" in note for note in resumed.notes) == begins_again
    require_each_prompt_once(tmp_path / "runs" / "run")


@pytest.mark.parametrize("number", [3, 16])
def test_steps_of_another_number_of_prompts_train_on_what_is_open(run: Run, tmp_path: Path, number: int) -> None:
    options = ahead(2, *SAVED, *LONG)
    killed(run, *options)
    run(*options, f"training.prompts_per_step={number}", resume=True, allow_changes=True)
    assert prompts(tmp_path / "runs" / "run").total() == 8 + 4 * number


@pytest.mark.parametrize("changed", [(), ("training.prompts_per_step=5",), ("async.max_staleness=0",)])
def test_what_was_learned_of_prompts_is_known_to_a_resumed_run(run: Run, tmp_path: Path, changed: tuple[str, ...]) -> None:
    """One token an answer, so that rewards are 0 or 1, and two answers a prompt."""
    short = ("rollout.max_response_tokens=1", "rollout.samples_per_prompt=2", "environment.fake.num_train_rows=16")
    options = ahead(2, *SAVED, *short, "data.zero_variance_weight=0.2")
    killed(run, *options)
    directory = tmp_path / "runs" / "run"
    before = read_metrics(directory)[-1]["data/zero_variance_prompts"]
    run(*options, *changed, resume=True, allow_changes=True)
    known = [record["data/zero_variance_prompts"] for record in read_metrics(directory)]
    assert before > 0
    assert all(one > 0 for one in known[len(known) - 3 :])
    assert prompts(directory).total() == (8 + 4 * 5 if changed == ("training.prompts_per_step=5",) else 40)


def test_components_of_rewards_are_kept_with_the_turns_that_a_checkpoint_has(run: Run, tmp_path: Path) -> None:
    """Of the fake environment the one component is the reward of each turn."""
    options = ahead(2, *SAVED, *LONG, *TWO_TURNS)
    killed(run, *options)
    run(*options, resume=True)
    table = rollouts(tmp_path / "runs" / "run")
    assert table["reward"].nunique() > 2
    np.testing.assert_allclose(table["reward/target"], table["reward"], rtol=1e-6)


def test_steps_that_may_wait_longer_take_what_ran_on(run: Run, tmp_path: Path) -> None:
    options = ahead(3, *SAVED, *LONG, "async.on_stale=rescore")
    killed(run, *options)
    run(*options, "async.max_staleness=1", "async.on_stale=drop", resume=True)
    late = [record["async/staleness_max"] for record in read_metrics(tmp_path / "runs" / "run")[2:]]
    assert max(late) <= 1.0


class Fails(FakeEnvironment):
    """Cannot begin with prompts that begin with a vowel."""

    async def reset(self, row: Row, seed: int) -> ResetResult:
        if seed and str(row["prompt"])[0] in "aeiou":  # not where prompts are looked at before the run
            raise ConnectionError("no judge")
        return await super().reset(row, seed)


def test_groups_that_could_not_begin_are_saved(run: Run, registry_with: Callable[..., Registry], tmp_path: Path) -> None:
    options = ahead(2, *SAVED, *LONG, *TWO_TURNS, "rollout.on_environment_error=mask", "rollout.max_failed_fraction=1.0")
    registry = registry_with(environment=Fails)
    killed(run, *options, registry=registry)
    run(*options, registry=registry, resume=True)
    assert prompts(tmp_path / "runs" / "run").total() == 40


def test_rescored_samples_that_ran_on_are_saved(run: Run, registry_with: Callable[..., Registry], tmp_path: Path) -> None:
    """At a staleness of 0: what a step did not wait for is trained on by a later one, also of the resumed run."""
    options = ahead(0, *SAVED, *SLOW, "async.on_stale=rescore", "async.extra_prompts=4")
    registry = registry_with(environment=Slow)
    killed(run, *options, step=2, registry=registry)
    run(*options, registry=registry, resume=True, progress=CountsSteps())
    assert set(prompts(tmp_path / "runs" / "run").values()) == {1}
    assert {prompt for prompt in prompts(tmp_path / "runs" / "run") if prompt[0] in "cdef"}
