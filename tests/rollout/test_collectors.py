"""Groups that are collected in several processes: the same samples, metrics and files as of one."""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas
import pytest

from rlcore.registry.discovery import Registry
from rlcore.run.plan.run_plan import RunPlan
from rlcore.run.protocols import CollectedRollouts
from rlcore.run.report.progress import Progress
from rlcore.spi import StepResult, TokenBatch, Turn, WorkerError
from rlcore.testing.fakes import fake_registry
from rlcore.testing.fakes.environment import FakeEnvironment
from rlcore_rollout.collector_messages import portable
from rlcore_rollout.collector_places import why_here
from rlcore_rollout.packed_groups import PackedGroups, Texts, joined

from ..core.run.conftest import read_metrics  # type: ignore[import-not-found]
from .collecting import ThreadHost
from .collecting import collect_in as collect_in
from .test_asynchrony import Killed, Watched, ahead, prompts

Run = Callable[..., dict[str, Any]]
CollectIn = Callable[..., list[ThreadHost]]
FILES = ("logging.rollouts_every_n_steps=1", "run.num_steps=4")
LONG = ("data.train.on_long_prompt=drop", "environment.fake.long=bdfh", "training.prompts_per_step=6")


def rollouts(directory: Path) -> pandas.DataFrame:
    return pandas.concat([pandas.read_parquet(path) for path in sorted((directory / "rollouts").glob("*.parquet"))])


class Fails(FakeEnvironment):
    """Every prompt with a certain letter fails in its first turn."""

    async def step(self, state: Any, turn: Turn) -> StepResult:
        if "e" in turn.text:
            raise ConnectionError("no tool")
        return await super().step(state, turn)


@pytest.mark.parametrize("num_collectors", [2, 3])
@pytest.mark.parametrize(
    ("options", "environment"),
    [
        ((), FakeEnvironment),
        (("rollout.max_turns=3", "environment.fake.num_turns=3", "rollout.max_response_tokens=40"), FakeEnvironment),
        (("rollout.dynamic_sampling=true", "rollout.max_refill_ratio=20"), FakeEnvironment),
        (("data.zero_variance_weight=0.5",), FakeEnvironment),
        (("rollout.on_environment_error=mask", "rollout.max_failed_fraction=1.0"), Fails),
    ],
    ids=["one turn", "turns", "dynamic sampling", "weights of prompts", "failures"],
)
def test_runs_are_those_of_one_collector(
    run: Run,
    collect_in: CollectIn,
    registry_with: Callable[..., Registry],
    tmp_path: Path,
    options: tuple[str, ...],
    environment: type,
    num_collectors: int,
) -> None:
    registry = registry_with(environment=environment)
    options = (*FILES, "environment.fake.num_train_rows=200", *options)
    run(*options, "run.name=one", registry=registry)
    hosts = collect_in(num_collectors, registry)
    run(*options, "run.name=many", registry=registry)
    assert len(hosts) == num_collectors
    one, many = tmp_path / "runs" / "one", tmp_path / "runs" / "many"
    assert read_metrics(many) == read_metrics(one)
    pandas.testing.assert_frame_equal(rollouts(many), rollouts(one))
    assert (many / "failures.jsonl").read_text() == (one / "failures.jsonl").read_text()


def test_a_killed_run_ahead_of_training_trains_on_each_prompt_once(run: Run, collect_in: CollectIn, tmp_path: Path) -> None:
    collect_in(2, fake_registry())
    options = ahead(2, "checkpoint.every_n_steps=1")
    with pytest.raises(Killed):
        run(*options, progress=Watched(3, kills=True))
    run(*options, resume=True)
    assert set(prompts(tmp_path / "runs" / "run").values()) == {1}
    assert prompts(tmp_path / "runs" / "run").total() == 64


class Counts(FakeEnvironment):
    """Counts how many of its calls are under way at once."""

    num_calls, most_calls = 0, 0

    async def step(self, state: Any, turn: Turn) -> StepResult:
        Counts.num_calls += 1
        Counts.most_calls = max(Counts.most_calls, Counts.num_calls)
        await asyncio.sleep(0.001)
        Counts.num_calls -= 1
        return await super().step(state, turn)


def test_as_many_calls_are_made_at_once_as_of_one_collector(
    run: Run, collect_in: CollectIn, registry_with: Callable[..., Registry]
) -> None:
    registry = registry_with(environment=Counts)
    collect_in(2, registry)
    run(*FILES, "rollout.environment_concurrency=5", registry=registry)
    assert 2 <= Counts.most_calls <= 5


class Kills(Progress):
    """Kills a collector once a step is done."""

    def __init__(self, hosts: list[ThreadHost]) -> None:
        self._hosts = hosts

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == 2:
            self._hosts[-1].kill()


def test_the_death_of_a_collector_ends_the_run(run: Run, collect_in: CollectIn, tmp_path: Path) -> None:
    hosts = collect_in(2, fake_registry())
    with pytest.raises(WorkerError, match="a collector was killed"):
        run(*FILES, progress=Kills(hosts))
    run(*FILES, resume=True)
    assert [record["step"] for record in read_metrics(tmp_path / "runs" / "run")][-1] == 4


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"runs_agents": True}, "sessions"),
        ({"replay_schedule": Path("schedule.jsonl")}, "replay"),
        ({"environments": [SimpleNamespace(name="python", provider=None)]}, "object of the driver's process"),
        (
            {"environments": [SimpleNamespace(name="judge", provider=SimpleNamespace(capabilities={"rollout:one_process"}))]},
            "one process",
        ),
    ],
)
def test_what_cannot_be_moved_stays_in_the_driver(changes: dict[str, Any], reason: str | None) -> None:
    recipe = SimpleNamespace(rollout=SimpleNamespace(environment_concurrency=None))
    whole = {"runs_agents": False, "replay_schedule": None, "environments": [], "recipe": recipe}
    plan: Any = SimpleNamespace(**{**whole, **changes})
    assert (why_here(plan, 2) is None) == (reason is None)
    assert reason is None or reason in str(why_here(plan, 2))


def test_a_limit_of_calls_below_the_collectors_keeps_them_in_the_driver(prepared: Callable[..., RunPlan]) -> None:
    plan = prepared("rollout.environment_concurrency=2")
    assert why_here(plan, 2) is None
    assert "2 calls at once" in str(why_here(plan, 3))


def packed(lengths: list[int], groups: list[int], first: int) -> PackedGroups:
    """A sequence of each length, whose tokens are its number from `first` on."""
    number = len(lengths)
    numbers = np.arange(first, first + number)
    tokens = np.repeat(numbers, lengths).astype(np.int32)
    batch = TokenBatch(
        tokens=tokens,
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        loss_mask=np.concatenate([np.arange(length) > 0 for length in lengths]),
        token_columns={"weight_versions": tokens, "generation_logprobs": -tokens.astype(np.float32)},
        sequence_columns={"group_ids": np.array(groups, np.int32)},
    )
    flags = np.zeros(number, np.bool_)
    rollouts = CollectedRollouts(
        batch=batch,
        rewards=numbers.astype(np.float32),
        valid=~flags,
        finish_reasons=np.ones(number, np.uint8),
        success=flags,
        responses=Texts([f"text {one}" for one in numbers]),
        num_generated=np.array(lengths) - 1,
        failed=flags,
        timed_out=flags,
        truncated=flags,
        failures=[None] * number,
    )
    values = numbers.astype(np.float64)
    return PackedGroups(rollouts=rollouts, reported={"number": (values, np.array(groups, np.int32))})


def test_groups_between_each_other_are_put_in_order() -> None:
    """Groups 3 and 7 of one collector, 5 of another."""
    whole = joined([packed([2, 3, 4], [0, 0, 1], 0), packed([2, 2], [0, 0], 3)], [[3, 7], [5]])
    assert whole.rewards.tolist() == [0.0, 1.0, 3.0, 4.0, 2.0]
    assert whole.group_ids.tolist() == [0, 0, 1, 1, 2]
    assert whole.batch.tokens.tolist() == [0, 0, 1, 1, 1, 3, 3, 4, 4, 2, 2, 2, 2]
    assert list(whole.responses) == [f"text {one}" for one in (0, 1, 3, 4, 2)]
    assert whole.environment_metrics == {"number": 2.0}


def test_one_collector_copies_no_column() -> None:
    part = packed([2, 3], [0, 1], 0)
    whole = joined([part], [[0, 1]])
    assert whole.batch is part.rollouts.batch


def test_errors_keep_their_class_and_their_text() -> None:
    assert isinstance(portable(WorkerError("engine 0 died")), WorkerError)

    class Local(Exception):
        pass

    assert "Local: no such thing" in str(portable(Local("no such thing")))
