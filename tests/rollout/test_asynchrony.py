"""Runs whose generation goes ahead of training, with the fakes: the samples' age, unfinished ones, resume."""

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas
import pytest
from attrs import evolve

from rlcore.registry.discovery import Registry
from rlcore.run.report.progress import Progress
from rlcore.spi import (
    ConfigError,
    EnvironmentContext,
    ExportWeightsRequest,
    InterruptedRun,
    Observation,
    ResetResult,
    RewardError,
    Row,
    StepResult,
    Turn,
    WeightExport,
    hookimpl,
)
from rlcore.testing.fakes.environment import FakeEnvironment, FakeEnvironmentConfig
from rlcore.testing.fakes.generator import FakeGenerator, RunningSamples
from rlcore.testing.fakes.policy import NAMES, log_softmax, logits
from rlcore.testing.fakes.trainer import FakeTrainer

from ..core.run.conftest import read_metrics  # type: ignore[import-not-found]

Run = Callable[..., dict[str, Any]]

STEPS = (
    "algorithm.fake.generation_ratio=true",
    "environment.fake.num_train_rows=128",
    "logging.rollouts_every_n_steps=1",
    "run.num_steps=8",
    "training.minibatches_per_step=1",
)


def ahead(steps: int, *options: str) -> tuple[str, ...]:
    return (*STEPS, f"async.max_staleness={steps}", *options)


def rollouts(directory: Path) -> pandas.DataFrame:
    return pandas.concat([pandas.read_parquet(path) for path in sorted((directory / "rollouts").glob("step-*.parquet"))])


def prompts(directory: Path) -> Counter[str]:
    """How many groups were trained on of each prompt."""
    return Counter(rollouts(directory).groupby(["step", "group"])["prompt"].first())


class Killed(BaseException):
    """Nothing handles it, as nothing handles a kill."""


class Watched(Progress):
    """Keeps the notes; kills the process's work behind a step, or presses Ctrl-C once so many samples have ended behind it."""

    def __init__(self, step: int = -1, num_samples: int = 0, *, kills: bool = False) -> None:
        self.notes: list[str] = []
        self._at, self._num_samples, self._kills = step, num_samples, kills
        self._step = Slow.steps_done = 0

    def note(self, text: str) -> None:
        self.notes.append(text)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._step = Slow.steps_done = step
        if self._kills and step == self._at:
            raise Killed

    def samples(self, num_finished: int, num_samples: int) -> None:
        # Or behind a later step: what a step takes may have been there before it.
        if not self._kills and self._step >= self._at >= 0 and num_finished >= self._num_samples:
            self._at = -1
            os.kill(os.getpid(), signal.SIGINT)


class Recording(FakeTrainer):
    """Keeps the weights of every version that it exports."""

    weights_of: ClassVar[dict[int, dict[str, Any]]] = {}

    @hookimpl
    def export_weights(self, request: ExportWeightsRequest) -> WeightExport:
        self.weights_of[request.weight_version] = {name: self.weights[name].copy() for name in NAMES}
        return super().export_weights(request)


class Unhurried(FakeGenerator):
    """Leaves the others time to end its stream while samples run."""

    def step(self, samples: RunningSamples) -> Any:
        time.sleep(0.002)
        return super().step(samples)


@pytest.mark.parametrize("staleness", [1, 3])
def test_each_token_has_the_log_probability_of_the_weights_that_it_names(
    run: Run, registry_with: Callable[..., Registry], tmp_path: Path, staleness: int
) -> None:
    """By the fakes' own formula, in float64; samples that several versions said go on behind one another."""
    Recording.weights_of.clear()
    lengths = ("rollout.max_response_tokens=60", "rollout.samples_per_prompt=2")  # that differ from group to group
    run(*ahead(staleness), *lengths, registry=registry_with(trainer=Recording, generator=Unhurried))
    table = rollouts(tmp_path / "runs" / "run")
    num_spanning = 0
    for sample in table.itertuples():
        tokens, mask = np.asarray(sample.tokens), np.asarray(sample.loss_mask)
        versions = np.asarray(sample.weight_versions)[mask]
        assert (np.diff(versions) >= 0).all()
        assert versions[-1] <= sample.step - 1
        num_spanning += len(set(versions)) > 1
        for position in np.flatnonzero(mask):
            weights = Recording.weights_of[int(sample.weight_versions[position])]
            context = (tokens[:1], tokens[position - 1 : position], np.array([position]))
            expected = log_softmax(logits(weights, *context))[0, tokens[position]]
            assert sample.generation_logprobs[position] == pytest.approx(expected, abs=1e-5)
    assert num_spanning > 0


@pytest.mark.parametrize("staleness", [1, 3])
def test_samples_are_within_their_bound_and_each_prompt_is_trained_on_once(run: Run, tmp_path: Path, staleness: int) -> None:
    run(*ahead(staleness))
    records = [record for record in read_metrics(tmp_path / "runs" / "run") if "async/staleness_max" in record]
    assert len(records) == 8
    assert max(record["async/staleness_max"] for record in records) == staleness
    assert all(record["async/groups_open"] <= 8 * staleness for record in records)
    assert set(prompts(tmp_path / "runs" / "run").values()) == {1}
    assert prompts(tmp_path / "runs" / "run").total() == 64


def test_no_staleness_is_the_run_without_the_section(run: Run, tmp_path: Path) -> None:
    run(*STEPS, "run.name=plain")
    run(*STEPS, "async.max_staleness=0", "run.name=zero")
    assert read_metrics(tmp_path / "runs" / "plain") == read_metrics(tmp_path / "runs" / "zero")


def test_restarted_samples_are_of_one_version(run: Run, tmp_path: Path) -> None:
    run(*ahead(2, "async.partial_rollouts=restart"))
    for sample in rollouts(tmp_path / "runs" / "run").itertuples():
        assert len(set(np.asarray(sample.weight_versions)[np.asarray(sample.loss_mask)])) == 1
    assert set(prompts(tmp_path / "runs" / "run").values()) == {1}


class Slow(FakeEnvironment):
    """Answers to prompts that begin with c, d, e or f wait for the end of a step."""

    steps_done = 0
    awaited_step = 2

    def __init__(self, context: EnvironmentContext, config: FakeEnvironmentConfig) -> None:
        super().__init__(context, config)

    async def reset(self, row: Row, seed: int) -> ResetResult:
        text = str(row["prompt"])
        return ResetResult(observation=Observation(text=text), state=text[0] in "cdef")

    async def step(self, state: bool, turn: Turn) -> StepResult:
        while state and Slow.steps_done < self.awaited_step:
            await asyncio.sleep(0.01)
        return await super().step(0, turn)


class CountsSteps(Progress):
    """Lets the slow ones go on."""

    def __init__(self) -> None:
        Slow.steps_done = 0

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        Slow.steps_done = step


SLOW = ("data.train.shuffle=false", "run.num_steps=4", "evaluation.at_start=false", "evaluation.every_n_steps=0")


def test_groups_beyond_the_bound_are_dropped_and_counted(
    run: Run, registry_with: Callable[..., Registry], tmp_path: Path
) -> None:
    registry = registry_with(environment=Slow)
    run(*ahead(0), *SLOW, "async.on_stale=drop", "async.extra_prompts=4", registry=registry, progress=CountsSteps())
    records = [record for record in read_metrics(tmp_path / "runs" / "run") if "async/staleness_max" in record]
    assert {record["async/staleness_max"] for record in records} == {0.0}
    assert sum(record["async/groups_dropped"] for record in records) >= 4
    assert not [prompt for prompt in prompts(tmp_path / "runs" / "run") if prompt[0] in "cdef"]
    assert max(prompts(tmp_path / "runs" / "run").values()) == 1


class SlowToBegin(Slow):
    """It waits when it begins, but not where prompts are looked at before the run."""

    awaited_step = 1

    async def reset(self, row: Row, seed: int) -> ResetResult:
        result = await super().reset(row, seed)
        while seed and result.state and Slow.steps_done < self.awaited_step:
            await asyncio.sleep(0.01)
        return result


def test_no_step_waits_for_the_beginning_of_what_it_need_not_train_on(
    run: Run, registry_with: Callable[..., Registry], tmp_path: Path
) -> None:
    registry, progress = registry_with(environment=SlowToBegin), CountsSteps()
    run(*ahead(0), *SLOW, "async.on_stale=rescore", "async.extra_prompts=4", registry=registry, progress=progress)
    assert {prompt for prompt in prompts(tmp_path / "runs" / "run") if prompt[0] in "cdef"}


def test_tokens_beyond_the_bound_get_the_trainers_log_probabilities(
    run: Run, registry_with: Callable[..., Registry], tmp_path: Path
) -> None:
    Recording.weights_of.clear()
    registry = registry_with(environment=Slow, trainer=Recording)
    run(*ahead(0), *SLOW, "async.on_stale=rescore", "async.extra_prompts=4", registry=registry, progress=CountsSteps())
    records = [record for record in read_metrics(tmp_path / "runs" / "run") if "async/tokens_rescored" in record]
    assert sum(record["async/tokens_rescored"] for record in records) > 0
    assert max(record["async/staleness_max"] for record in records) > 0


class Lying(FakeGenerator):
    """Reports half a nat too little."""

    def step(self, samples: RunningSamples) -> Any:
        running, position = samples.left, samples.num_steps
        ended = super().step(samples)
        samples.logprobs[running, position] -= 0.5
        return ended


def test_tokens_beyond_the_bound_hide_no_disagreement(run: Run, registry_with: Callable[..., Registry], tmp_path: Path) -> None:
    """The trainer, which scored them, would agree with itself. Files say what was sampled, by which weights."""
    registry = registry_with(environment=Slow, generator=Lying)
    run(
        *ahead(0),
        *SLOW,
        "async.on_stale=rescore",
        "async.extra_prompts=4",
        "rollout.stop_token_ids=[]",
        "training.max_token_mult_prob_error=9",
        registry=registry,
        progress=CountsSteps(),
    )
    records = [record for record in read_metrics(tmp_path / "runs" / "run") if "async/tokens_rescored" in record]
    compared = [record for record in records if record["async/tokens_rescored"] and "token_mult_prob_error" in record]
    assert compared
    assert [record["token_mult_prob_error"] for record in compared] == [pytest.approx(np.exp(0.5), rel=1e-4)] * len(compared)
    table = rollouts(tmp_path / "runs" / "run")
    for record in records:
        samples = table[table["step"] == record["step"]]
        versions = np.concatenate(samples["weight_versions"].to_list())
        before = record["weight_version"] - record["updates"]
        assert ((versions >= 0) & (versions < before)).sum() == record["async/tokens_rescored"]


def test_groups_without_a_signal_are_replaced(run: Run, tmp_path: Path) -> None:
    run(*STEPS, "rollout.dynamic_sampling=true", "rollout.max_response_tokens=2", "rollout.max_refill_ratio=20")
    table = rollouts(tmp_path / "runs" / "run")
    assert (table.groupby(["step", "group"])["reward"].nunique() > 1).all()
    assert (table.groupby("step")["group"].nunique() == 8).all()
    assert sum(record.get("async/groups_refilled", 0.0) for record in read_metrics(tmp_path / "runs" / "run")) > 0


def test_so_are_groups_whose_rewards_differ_only_by_samples_that_are_masked(run: Run, tmp_path: Path) -> None:
    masked = ("rollout.on_truncation=mask", "rollout.max_response_tokens=16", "rollout.max_refill_ratio=50")
    run(*STEPS, *masked, "rollout.dynamic_sampling=true")
    table = rollouts(tmp_path / "runs" / "run")
    assert not table["valid"].all()
    kept = table[table["valid"]].groupby(["step", "group"])["reward"].nunique()
    assert len(kept) == 8 * 8
    assert (kept > 1).all()


def test_too_many_replaced_groups_end_the_run(run: Run) -> None:
    with pytest.raises(RewardError, match="rollout.max_refill_ratio"):
        run(*STEPS, "rollout.dynamic_sampling=true", "environment.fake.target='!'")


def test_a_resumed_run_of_replaced_groups_goes_on_behind_them(run: Run, tmp_path: Path) -> None:
    options = (*STEPS, "rollout.dynamic_sampling=true", "rollout.max_response_tokens=2", "rollout.max_refill_ratio=20")
    run(*options, "run.name=whole")
    with pytest.raises(Killed):
        run(*options, "run.name=killed", progress=Watched(3, kills=True))
    run(*options, "run.name=killed", resume=True)
    assert read_metrics(tmp_path / "runs" / "killed") == read_metrics(tmp_path / "runs" / "whole")


@pytest.mark.wide(keep=["2-1", "3-2", "6-1"])
@pytest.mark.parametrize("staleness", [1, 2])
@pytest.mark.parametrize("killed_after", [2, 3, 6])
def test_a_killed_run_loses_and_repeats_no_prompt(run: Run, tmp_path: Path, staleness: int, killed_after: int) -> None:
    options = ahead(staleness, "checkpoint.every_n_steps=1")
    with pytest.raises(Killed):
        run(*options, progress=Watched(killed_after, kills=True))
    run(*options, resume=True)
    assert set(prompts(tmp_path / "runs" / "run").values()) == {1}
    assert prompts(tmp_path / "runs" / "run").total() == 64


@pytest.mark.parametrize(("step", "num_samples"), [(0, 1), (2, 5), (4, 1), (6, 2)])
def test_ctrl_c_keeps_what_was_generated(run: Run, tmp_path: Path, step: int, num_samples: int) -> None:
    options = ahead(1, "checkpoint.every_n_steps=0", "evaluation.at_start=false")
    progress = Watched(step, num_samples)
    with pytest.raises(InterruptedRun, match="--resume"):
        run(*options, progress=progress)
    run(*options, resume=True)
    assert set(prompts(tmp_path / "runs" / "run").values()) == {1}
    assert prompts(tmp_path / "runs" / "run").total() == 64


class Unsavable(Slow):
    """Its states hold a function."""

    awaited_step = 1

    async def reset(self, row: Row, seed: int) -> ResetResult:
        result = await super().reset(row, seed)
        return evolve(result, state=lambda: result.state)

    async def step(self, state: Any, turn: Turn) -> StepResult:
        result = await super().step(state(), turn)
        return evolve(result, state=lambda: result.state)


def test_states_that_cannot_be_saved_begin_again(run: Run, registry_with: Callable[..., Registry], tmp_path: Path) -> None:
    registry = registry_with(environment=Unsavable)
    options = ahead(1, *SLOW, "checkpoint.every_n_steps=1")
    progress = Watched(2, kills=True)
    with pytest.raises(Killed):
        run(*options, progress=progress, registry=registry)
    assert any("unfinished groups cannot be saved" in note for note in progress.notes)
    run(*options, resume=True, registry=registry)
    assert set(prompts(tmp_path / "runs" / "run").values()) == {1}


@pytest.mark.parametrize(
    ("options", "path"),
    [
        (("async.max_staleness=1",), "async.max_staleness"),
        (("async.max_staleness=-1",), "async.max_staleness"),
        (("async.on_stale=drop",), "async.on_stale"),
        (("async.partial_rollouts=restart",), "async.partial_rollouts"),
        (("async.extra_prompts=2",), "async.extra_prompts"),
        (("async.max_stalenes=1",), "async.max_stalenes"),
        (("rollout.max_refill_ratio=2",), "rollout.max_refill_ratio"),
        (("rollout.dynamic_sampling=true", "rollout.samples_per_prompt=1"), "rollout.dynamic_sampling"),
        (("algorithm.fake.source=demonstrations", "async.max_staleness=1"), "async"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_starts(run: Run, options: tuple[str, ...], path: str) -> None:
    with pytest.raises(ConfigError) as raised:
        run(*options)
    assert path in [problem.path for problem in raised.value.problems]
