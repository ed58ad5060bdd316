"""Prompts that come by weights of their rewards: the formulas, the rates, and runs that are resumed."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.run.data.prompt_stream import PromptStream
from rlcore.spi import CheckpointError, ConfigError, PluginError
from rlcore_rollout.curriculum import Curriculum
from rlcore_rollout.prompt_weights import UNIFORM_SHARE, PromptOutcomes, prompt_weights, rates

from ..core.run.conftest import read_metrics  # type: ignore[import-not-found]
from ..replay.test_replayed_runs import weights  # type: ignore[import-not-found]
from .test_asynchrony import Killed, Watched, ahead, prompts  # type: ignore[import-not-found]

Run = Callable[..., dict[str, Any]]
NAMES = ("learnability", "learning_progress", "failure_rate")


def outcomes(*groups: tuple[int, Sequence[float], float], num_rows: int = 4) -> PromptOutcomes:
    return PromptOutcomes.empty(num_rows).with_groups(groups)


HALF, THIRD = ([1.0, 0.0, 1.0, 0.0], 0.5), ([0.0, 0.0, 1.0], 1 / 3)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("learnability", [0.25, 0.0, 2 / 9, 0.0]),  # p(1 - p)
        ("learning_progress", [0.5, 1.0, (2 / 9) ** 0.5, 0.0]),  # of one group, its standard deviation
        ("failure_rate", [0.5, 0.0, 2 / 3, 1.0]),
    ],
)
def test_weights_are_those_of_the_formulas(name: str, expected: list[float]) -> None:
    found = outcomes((0, [0.0, 0.0], 0.0), (0, *HALF), (1, [0.0, 0.0], 0.0), (1, [1.0, 1.0], 1.0), (2, *THIRD))
    assert prompt_weights(name)(found) == pytest.approx(expected, abs=1e-15)
    most = max(expected[:3])
    assert rates(prompt_weights(name), found) == pytest.approx(
        [*(UNIFORM_SHARE + (1 - UNIFORM_SHARE) * value / most for value in expected[:3]), 1.0]
    )


@given(st.lists(st.lists(st.floats(-5, 5), min_size=1, max_size=6), min_size=2, max_size=4))
def test_outcomes_are_those_of_the_last_groups(groups: list[list[float]]) -> None:
    found = outcomes(*((2, rewards, 0.5) for rewards in groups))
    assert found.num_groups.tolist() == [0, 0, len(groups), 0]
    assert found.mean[2] == pytest.approx(np.mean(groups[-1]), abs=1e-12)
    assert found.variance[2] == pytest.approx(np.var(groups[-1]), abs=1e-12)
    assert found.change[2] == pytest.approx(np.mean(groups[-1]) - np.mean(groups[-2]), abs=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_all_rows_come_as_often_where_no_weight_is_above_zero(name: str) -> None:
    nothing = outcomes(*((row, [1.0, 1.0], 1.0) for row in (0, 1, 2)), *((row, [1.0, 1.0], 1.0) for row in (0, 1, 2)))
    assert rates(prompt_weights(name), nothing).tolist() == [1.0] * 4


@pytest.mark.parametrize("wrong", [np.ones(3), -np.ones(4), np.full(4, np.nan), np.ones(4, np.float32)], ids=str)
def test_weights_of_another_form_are_refused(wrong: Any) -> None:
    with pytest.raises(PluginError, match=r"data\.prompt_weights"):
        rates(lambda _: wrong, outcomes((0, *HALF)))


def test_a_name_that_nobody_installed_is_refused_with_those_that_are() -> None:
    with pytest.raises(PluginError) as caught:
        prompt_weights("sharpness")
    assert all(name in str(caught.value) for name in NAMES)


def weighed(num_rows: int, batch_size: int, seed: int = 0) -> Curriculum:
    order = PromptStream(num_rows=num_rows, batch_size=batch_size, seed=seed, shuffle=True)
    return Curriculum(order, 1.0, weights=prompt_weights("learnability"))


def learn(curriculum: Curriculum, step: int, chances: Sequence[float]) -> None:
    rows = curriculum.indices(step).tolist()
    rewards = {
        step * len(rows) + place: (np.repeat([1.0, 0.0], [round(8 * p), 8 - round(8 * p)]).tolist(), p)
        for place, p in enumerate(chances[row] for row in rows)
    }
    curriculum.learn(dict.fromkeys(rewards, True), {}, rewards)
    curriculum.forget_before(step)


def test_rows_come_in_the_ratio_of_their_rates() -> None:
    chances = [0.0] * 20 + [0.125] * 10 + [0.5] * 10
    curriculum, counts = weighed(40, 8), np.zeros(40)
    for step in range(1500):
        np.add.at(counts, curriculum.indices(step), 1)
        learn(curriculum, step, chances)
    expected = UNIFORM_SHARE + (1 - UNIFORM_SHARE) * np.array([0.0, 0.125 * 0.875 / 0.25, 1.0])
    found = np.array([counts[:20].mean(), counts[20:30].mean(), counts[30:].mean()])
    assert found / found[-1] == pytest.approx(expected, rel=0.08)


@given(seed=st.integers(0, 2**31), cut=st.integers(1, 9), num_rows=st.integers(1, 20), batch_size=st.integers(1, 8))
def test_what_was_saved_goes_on_as_if_it_had_not_been(seed: int, cut: int, num_rows: int, batch_size: int) -> None:
    chances = np.linspace(0, 1, num_rows).tolist()
    whole, expected = weighed(num_rows, batch_size, seed), []
    for step in range(10):
        expected.append(whole.indices(step).tolist())
        if step == cut:
            saved = whole.state()
        learn(whole, step, chances)
    again = weighed(num_rows, batch_size, seed)
    again.begin(0, saved)
    for step in range(cut, 10):
        assert again.indices(step).tolist() == expected[step]
        learn(again, step, chances)
    with pytest.raises(CheckpointError, match="prompts"):
        weighed(num_rows + 1, batch_size, seed).begin(0, saved)


ROWS = ("environment.fake.num_train_rows=16", "checkpoint.every_n_steps=1", "evaluation.every_n_steps=0")
REFILLED = ("rollout.dynamic_sampling=true", "rollout.max_refill_ratio=50")


@pytest.mark.parametrize(
    ("name", "more"),
    [("learnability", ()), ("learning_progress", REFILLED), ("learnability", ("rollout.reuse=2", "async.max_staleness=1"))],
    ids=str,
)
def test_a_killed_run_takes_the_same_prompts(run: Run, tmp_path: Path, name: str, more: Sequence[str]) -> None:
    options = (*ahead(0), *ROWS, f"data.prompt_weights={name}", *more)
    run(*options, "run.name=whole")
    with pytest.raises(Killed):
        run(*options, "run.name=parts", progress=Watched(5, kills=True))
    run(*options, "run.name=parts", resume=True)
    whole, parts = tmp_path / "runs" / "whole", tmp_path / "runs" / "parts"
    assert prompts(whole) == prompts(parts)
    assert read_metrics(whole) == read_metrics(parts)
    assert weights(whole) == weights(parts)
    records = [record for record in read_metrics(whole) if record["step"] > 0]
    assert records[0]["data/rate_mean"] == 1.0
    assert records[-1]["data/rate_mean"] < 1.0


@pytest.mark.parametrize(
    "options",
    [
        ("data.prompt_weights=sharpness",),
        ("data.prompt_weights=learnability", "rollout.samples_per_prompt=1"),
        ("data.prompt_weights=learnability", "data.zero_variance_weight=0.5"),
        ("data.prompt_weights=learnability", "data.curriculum_threshold=0.5"),
        ("data.prompt_weights=learnability", "algorithm.fake.source=demonstrations"),
    ],
    ids=str,
)
def test_what_contradicts_itself_is_refused(prepared: Callable[..., Any], options: Sequence[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        prepared(*options)
    assert "data.prompt_weights" in {problem.path for problem in caught.value.problems}
