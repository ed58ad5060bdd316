"""Groups that get samples as long as nothing can be learned from them, with the fakes."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlcore.spi import ConfigError

from ..core.run.conftest import read_metrics  # type: ignore[import-not-found]
from ..replay.test_replayed_runs import assert_equal, weights  # type: ignore[import-not-found]
from .test_asynchrony import Killed, Watched, ahead, rollouts  # type: ignore[import-not-found]

Run = Callable[..., dict[str, Any]]
SHORT = ("rollout.max_response_tokens=2", "evaluation.every_n_steps=0", "checkpoint.every_n_steps=1", "run.num_steps=6")
GROWING = (*SHORT, "rollout.samples_per_prompt=2", "rollout.max_samples_per_prompt=8")


def require_rounds(directory: Path, size: int = 2, most: int = 8) -> set[int]:
    """Each group stops behind the round that tells its samples apart, or at the limit."""
    sizes = set()
    for _, group in rollouts(directory).groupby(["step", "group"]):
        rewards = group["reward"].tolist()
        sizes.add(len(rewards))
        assert len(rewards) % size == 0
        assert len(rewards) <= most
        assert len(set(rewards[:-size])) <= 1
        assert len(set(rewards)) > 1 or len(rewards) == most
    return sizes


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_group_gets_samples_until_its_rewards_differ(run: Run, tmp_path: Path, staleness: int) -> None:
    run(*ahead(staleness), *GROWING)
    directory = tmp_path / "runs" / "run"
    sizes = require_rounds(directory)
    assert {2, 8} <= sizes
    counts = rollouts(directory).groupby(["step", "group"]).size().groupby("step")
    records = [record for record in read_metrics(directory) if record["step"] > 0]
    assert [record["samples_per_prompt_mean"] for record in records] == counts.mean().tolist()
    assert [record["samples_per_prompt_max"] for record in records] == counts.max().tolist()


def test_samples_of_the_first_round_are_those_of_a_run_without_others(run: Run, tmp_path: Path) -> None:
    """More samples of another group change none of them."""
    first = ("run.num_steps=1",)
    run(*ahead(0), *GROWING, *first, "run.name=grown")
    run(*ahead(0), *SHORT, "rollout.samples_per_prompt=8", *first, "run.name=whole")
    grown, whole = (rollouts(tmp_path / "runs" / name).groupby("group")["response"].apply(list) for name in ("grown", "whole"))
    assert all(own == other[: len(own)] for own, other in zip(grown, whole, strict=True))


def test_a_group_that_never_tells_its_samples_apart_is_replaced(run: Run, tmp_path: Path) -> None:
    run(*ahead(0), *GROWING, "rollout.dynamic_sampling=true", "rollout.max_refill_ratio=50")
    assert all(len(set(group["reward"])) > 1 for _, group in rollouts(tmp_path / "runs" / "run").groupby(["step", "group"]))


@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("more", [(), ("async.max_staleness=1", "rollout.reuse=2")], ids=str)
def test_a_killed_run_goes_on_with_groups_of_its_sizes(run: Run, tmp_path: Path, step: int, more: Sequence[str]) -> None:
    options = (*ahead(0), *GROWING, *more)
    run(*options, "run.name=whole")
    with pytest.raises(Killed):
        run(*options, "run.name=parts", progress=Watched(step, kills=True))
    run(*options, "run.name=parts", resume=True)
    whole, parts = tmp_path / "runs" / "whole", tmp_path / "runs" / "parts"
    assert read_metrics(whole) == read_metrics(parts)
    assert weights(whole) == weights(parts)
    assert rollouts(whole).equals(rollouts(parts))


def test_a_replay_has_groups_of_the_same_sizes(run: Run, tmp_path: Path) -> None:
    options, progress = (*ahead(2), *GROWING), Watched()
    run(*options, "run.name=first")
    first, again = tmp_path / "runs" / "first", tmp_path / "runs" / "again"
    run(*options, "run.name=again", replay_schedule=first / "schedule.jsonl", progress=progress)
    assert not [note for note in progress.notes if "replay" in note]
    assert_equal(first, again)
    assert len(require_rounds(again)) > 1


def test_resumed_groups_of_other_sizes_begin_again(run: Run, tmp_path: Path) -> None:
    options = (*ahead(2), *GROWING)
    with pytest.raises(Killed):
        run(*options, progress=Watched(2, kills=True))
    run(*options, "rollout.max_samples_per_prompt=4", resume=True)
    table = rollouts(tmp_path / "runs" / "run")
    assert table[table["step"] > 2].groupby(["step", "group"]).size().max() == 4


@pytest.mark.parametrize(
    "options",
    [
        ("rollout.samples_per_prompt=4", "rollout.max_samples_per_prompt=6"),
        ("rollout.samples_per_prompt=4", "rollout.max_samples_per_prompt=4"),
        ("rollout.samples_per_prompt=1", "rollout.max_samples_per_prompt=4"),
        ("rollout.max_samples_per_prompt=16", "algorithm.fake.source=demonstrations"),
    ],
    ids=str,
)
def test_what_contradicts_itself_is_refused(prepared: Callable[..., Any], options: Sequence[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        prepared(*options)
    assert "rollout.max_samples_per_prompt" in {problem.path for problem in caught.value.problems}
