"""Batches of samples that several steps train on, with the fakes: resumed, replayed and evaluated, bit for bit."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlcore.registry.discovery import Registry
from rlcore.spi import ConfigError
from rlcore.testing.fakes.generator import FakeGenerator, RunningSamples

from ..core.run.conftest import read_metrics  # type: ignore[import-not-found]
from ..replay.test_replayed_runs import assert_equal, weights  # type: ignore[import-not-found]
from .test_asynchrony import Killed, Watched, ahead, prompts, rollouts  # type: ignore[import-not-found]

Run = Callable[..., dict[str, Any]]
LONG = ("rollout.max_response_tokens=60", "rollout.samples_per_prompt=2", "checkpoint.every_n_steps=1")
TWICE = ahead(1, *LONG, "rollout.reuse=2")


class Counting(FakeGenerator):
    """Counts the steps in which it generates."""

    num_calls = 0

    def step(self, samples: RunningSamples) -> Any:
        type(self).num_calls += 1
        return super().step(samples)


def samples_of_steps(directory: Path) -> list[list[tuple[Any, ...]]]:
    table = rollouts(directory)
    return [
        [(*map(tuple, (one.tokens, one.generation_logprobs, one.weight_versions)), one.reward) for one in step.itertuples()]
        for _, step in table.groupby("step")
    ]


def require_reuse(directory: Path, reuse: int, most: int = 1) -> None:
    steps = samples_of_steps(directory)
    for place, samples in enumerate(steps):
        assert (samples == steps[place - 1]) == (place % reuse > 0)
    staleness = [record["async/staleness_max"] for record in read_metrics(directory) if record["step"] > 0]
    assert all(place % reuse <= number <= most for place, number in enumerate(staleness))


def test_steps_train_on_the_samples_of_the_first_of_them(
    run: Run, registry_with: Callable[..., Registry], tmp_path: Path
) -> None:
    calls = []
    for reuse in (1, 2):
        Counting.num_calls = 0
        options = (*ahead(reuse - 1), *LONG, f"rollout.reuse={reuse}", "evaluation.every_n_steps=0", f"run.name=used{reuse}")
        run(*options, registry=registry_with(generator=Counting))
        calls.append(Counting.num_calls)
    require_reuse(tmp_path / "runs" / "used2", 2)
    assert calls[1] < 0.75 * calls[0]
    lines = [json.loads(line) for line in (tmp_path / "runs" / "used2" / "metrics.jsonl").read_text().splitlines()]
    records = [line for line in lines if line["step"] > 0]
    assert [record["generated_tokens_per_second"] > 0 for record in records] == [True, False] * 4
    assert all(record["updates"] == 1.0 for record in records)


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_killed_run_goes_on_with_its_batch(run: Run, tmp_path: Path, step: int) -> None:
    run(*TWICE, "run.name=whole")
    with pytest.raises(Killed):
        run(*TWICE, "run.name=parts", progress=Watched(step, kills=True))
    run(*TWICE, "run.name=parts", resume=True)
    assert_equal(tmp_path / "runs" / "whole", tmp_path / "runs" / "parts")


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_killed_run_that_generates_ahead_goes_on_with_its_batch(run: Run, tmp_path: Path, step: int) -> None:
    """When its samples end depends on the clock."""
    options = ahead(3, *LONG, "rollout.reuse=2")
    with pytest.raises(Killed):
        run(*options, progress=Watched(step, kills=True))
    run(*options, resume=True)
    require_reuse(tmp_path / "runs" / "run", 2, most=3)
    assert set(prompts(tmp_path / "runs" / "run").values()) == {2}


@pytest.mark.parametrize("more", [(), ("async.max_staleness=5",), ("rollout.dynamic_sampling=true",)], ids=str)
def test_a_replay_trains_on_each_batch_as_often(run: Run, tmp_path: Path, more: Sequence[str]) -> None:
    options, progress = (*TWICE, *more, "rollout.max_refill_ratio=20" if "true" in str(more) else "run.seed=3"), Watched()
    run(*options, "run.name=first")
    first, again = tmp_path / "runs" / "first", tmp_path / "runs" / "again"
    run(*options, "run.name=again", replay_schedule=first / "schedule.jsonl", progress=progress)
    assert not [note for note in progress.notes if "replay" in note]
    assert_equal(first, again)


def test_an_evaluation_between_steps_on_one_batch_changes_nothing(run: Run, tmp_path: Path) -> None:
    for name, every in (("without", 0), ("with", 1)):
        run(*TWICE, f"run.name={name}", f"evaluation.every_n_steps={every}")
    without, with_them = tmp_path / "runs" / "without", tmp_path / "runs" / "with"
    assert weights(without) == weights(with_them)
    assert len([record for record in read_metrics(with_them) if "eval/pass@1" in record]) == 9


@pytest.mark.parametrize("changed", [("rollout.reuse=1",), ("rollout.reuse=3", "async.max_staleness=2")], ids=str)
def test_a_resumed_run_may_use_batches_otherwise(run: Run, tmp_path: Path, changed: Sequence[str]) -> None:
    with pytest.raises(Killed):
        run(*TWICE, progress=Watched(3, kills=True))
    run(*TWICE, *changed, resume=True)
    assert len(samples_of_steps(tmp_path / "runs" / "run")) == 8


@pytest.mark.parametrize(
    ("options", "path"),
    [
        (("rollout.reuse=2",), "rollout.reuse"),
        (("rollout.reuse=3", "async.max_staleness=1", "algorithm.fake.generation_ratio=true"), "rollout.reuse"),
        (("rollout.reuse=2", "algorithm.fake.source=demonstrations"), "rollout.reuse"),
        (("training.epochs_per_step=2", "algorithm.fake.source=demonstrations"), "training.epochs_per_step"),
        (("training.epochs_per_step=2",), "training.epochs_per_step"),
    ],
    ids=str,
)
def test_what_contradicts_itself_is_refused(prepared: Callable[..., Any], options: Sequence[str], path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        prepared(*options)
    assert path in {problem.path for problem in caught.value.problems}
