"""Microbatches hold every sequence once, within the token limit, and balanced by attention work."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.run.train_step.minibatches import plan_microbatches, sequence_costs

LENGTHS = st.lists(st.integers(1, 4096), min_size=1, max_size=200).map(lambda values: np.asarray(values, np.int64))


@settings(deadline=None)
@given(lengths=LENGTHS, max_tokens=st.integers(1, 8192))
def test_every_sequence_is_in_one_microbatch_within_the_limit(lengths: np.ndarray, max_tokens: int) -> None:
    plan = plan_microbatches(lengths, max_tokens=max_tokens)
    assert sorted(np.concatenate(plan).tolist()) == list(range(len(lengths)))
    for members in plan:
        assert len(members) == 1 or lengths[members].sum() <= max_tokens
        assert (np.diff(members) > 0).all()


@settings(deadline=None)
@given(lengths=LENGTHS)
def test_a_large_limit_gives_one_microbatch(lengths: np.ndarray) -> None:
    assert len(plan_microbatches(lengths, max_tokens=int(lengths.sum()))) == 1


@pytest.mark.parametrize("seed", range(5))
def test_attention_work_is_balanced_where_tokens_alone_would_not_balance_it(seed: int) -> None:
    random = np.random.default_rng(seed)
    lengths = np.clip(random.lognormal(6.3, 0.9, 512).astype(np.int64), 16, 4096)
    plan = plan_microbatches(lengths, max_tokens=16_384)
    costs = np.asarray([sequence_costs(lengths[m]).sum() for m in plan])
    assert costs.max() / costs.mean() < 1.02


def test_planning_is_linear_enough_for_large_steps() -> None:
    """65,536 sequences need few more bins than their tokens do, so no retry makes planning quadratic."""
    lengths = np.random.default_rng(0).integers(200, 1400, 65_536)
    plan = plan_microbatches(lengths, max_tokens=16_384)
    assert len(plan) <= 1.1 * lengths.sum() / 16_384 + 1


def first_fit_decreasing(lengths: np.ndarray, max_tokens: int) -> int:
    """Bins that the textbook's packing by tokens alone needs."""
    bins: list[int] = []
    for length in sorted(lengths.tolist(), reverse=True):
        place = next((index for index, filled in enumerate(bins) if filled + length <= max_tokens), None)
        if place is None:
            bins.append(length)
        else:
            bins[place] += length
    return len(bins)


@pytest.mark.parametrize("max_tokens", [1024, 2048, 8192])
@pytest.mark.parametrize("seed", range(10))
def test_no_more_microbatches_than_first_fit_decreasing(seed: int, max_tokens: int) -> None:
    random = np.random.default_rng(seed)
    for lengths in (
        random.integers(1, 1000, 200),
        np.clip(random.lognormal(6, 1, 200), 1, 1024),
        random.integers(400, 1024, 50),
    ):
        lengths = lengths.astype(np.int64)
        assert len(plan_microbatches(lengths, max_tokens=max_tokens)) <= first_fit_decreasing(lengths, max_tokens)
