"""Every data-parallel rank gets as many microbatches as the others, and as much work, at every moment of a step."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.run.train_step.minibatches import WIDTH, group_offsets, model_width, plan_microbatches, plan_ranks, sequence_costs

LENGTHS = st.lists(st.integers(1, 4096), min_size=1, max_size=120).map(lambda values: np.asarray(values, np.int64))
RANKS = st.integers(1, 9)
LIMITS = st.integers(1, 16_384)
WIDTHS = st.sampled_from([64, 1536, 8192])


def loads_of(plan: list[list[np.ndarray]], lengths: np.ndarray, width: int = 4096) -> np.ndarray:
    """float64 [ranks, microbatches]: the work of each."""
    costs = sequence_costs(lengths, width)
    return np.asarray([[costs[members].sum() for members in rank] for rank in plan])


def waiting(loads: np.ndarray) -> float:
    """By how much the ranks, which wait for each other in every microbatch, exceed a step without any waiting."""
    return float(loads.max(0).sum() / loads.sum(1).mean() - 1)


def realistic_lengths(number: int, seed: int) -> np.ndarray:
    """Log-normal with a mean near 795 tokens, cut at 4,096."""
    drawn = np.random.default_rng(seed).lognormal(6.38, 0.85, number)
    return np.clip(drawn, 8, 4096).astype(np.int64)


@settings(deadline=None)
@given(lengths=LENGTHS, num_ranks=RANKS, max_tokens=LIMITS, width=WIDTHS)
def test_ranks_share_every_sequence_within_the_limit(lengths: np.ndarray, num_ranks: int, max_tokens: int, width: int) -> None:
    plan = plan_ranks(lengths, num_ranks=num_ranks, max_tokens=max_tokens, width=width)
    assert len(plan) == num_ranks
    assert len({len(rank) for rank in plan}) == 1
    assert len(plan[0]) >= 1
    flat = [members for rank in plan for members in rank]
    assert sorted(np.concatenate(flat).tolist()) == list(range(len(lengths)))
    for members in flat:
        assert members.dtype == np.int64
        assert (np.diff(members) > 0).all()
        assert len(members) <= 1 or lengths[members].sum() <= max_tokens


@settings(deadline=None)
@given(lengths=LENGTHS, num_ranks=RANKS, max_tokens=LIMITS)
def test_a_microbatch_is_empty_only_where_there_are_fewer_sequences(
    lengths: np.ndarray, num_ranks: int, max_tokens: int
) -> None:
    plan = plan_ranks(lengths, num_ranks=num_ranks, max_tokens=max_tokens)
    num_empty = sum(len(members) == 0 for rank in plan for members in rank)
    assert num_empty == max(0, num_ranks * len(plan[0]) - len(lengths))


@settings(deadline=None)
@given(lengths=LENGTHS, num_ranks=RANKS, max_tokens=LIMITS, width=WIDTHS)
def test_waiting_is_bounded_by_the_spread_of_microbatches(
    lengths: np.ndarray, num_ranks: int, max_tokens: int, width: int
) -> None:
    loads = loads_of(plan_ranks(lengths, num_ranks=num_ranks, max_tokens=max_tokens, width=width), lengths, width)
    spread = loads.max() - loads.min() + 1e-6
    assert loads.max(0).sum() - loads.sum(1).mean() <= spread
    assert np.ptp(loads.sum(1)) <= max(np.ptp(loads, axis=0)) + 1e-6
    assert (np.diff(loads.mean(0)) <= 1e-6).all()  # the largest first, so that one too large for memory fails at once


@settings(deadline=None)
@given(lengths=LENGTHS, num_ranks=RANKS, width=WIDTHS)
def test_without_a_limit_ranks_differ_by_one_sequence_at_most(lengths: np.ndarray, num_ranks: int, width: int) -> None:
    plan = plan_ranks(lengths, num_ranks=num_ranks, max_tokens=int(lengths.sum()), width=width)
    assert len(plan[0]) <= 2  # a second one where little waiting is left by it
    assert np.ptp(loads_of(plan, lengths, width).sum(1)) <= sequence_costs(lengths, width).max() + 1e-6


@settings(deadline=None)
@given(lengths=LENGTHS, max_tokens=LIMITS, width=WIDTHS)
def test_one_rank_gets_what_plan_microbatches_says(lengths: np.ndarray, max_tokens: int, width: int) -> None:
    (rank,) = plan_ranks(lengths, num_ranks=1, max_tokens=max_tokens, width=width)
    alone = plan_microbatches(lengths, max_tokens=max_tokens, width=width)
    assert [members.tolist() for members in rank] == [members.tolist() for members in alone]


@settings(deadline=None)
@given(lengths=LENGTHS, num_ranks=RANKS, max_tokens=LIMITS)
def test_more_ranks_never_mean_more_microbatches_but_one(lengths: np.ndarray, num_ranks: int, max_tokens: int) -> None:
    alone = plan_microbatches(lengths, max_tokens=max_tokens)
    together = plan_ranks(lengths, num_ranks=num_ranks, max_tokens=max_tokens)
    fewest = -(-len(alone) // num_ranks)
    assert len(together[0]) <= fewest + 1
    assert len(together[0]) <= fewest or waiting(loads_of(together, lengths)) <= 0.02


@pytest.mark.parametrize(("num_sequences", "num_ranks"), [(512, 8), (2048, 64)])
@pytest.mark.parametrize("max_tokens", [8192, 16_384])
@pytest.mark.parametrize("width", [1536, 4096])
@pytest.mark.parametrize("seed", range(3))
def test_realistic_lengths_are_balanced_within_two_percent(
    num_sequences: int, num_ranks: int, max_tokens: int, width: int, seed: int
) -> None:
    lengths = realistic_lengths(num_sequences, seed)
    plan = plan_ranks(lengths, num_ranks=num_ranks, max_tokens=max_tokens, width=width)
    loads = loads_of(plan, lengths, width)
    totals = loads.sum(1)
    assert totals.max() / totals.mean() < 1.02
    assert waiting(loads) < 0.02


def test_one_more_microbatch_is_taken_where_full_ones_cannot_be_balanced() -> None:
    """The limit keeps short sequences from making up for long ones until there is some room."""
    lengths = realistic_lengths(512, 1)
    tokens = int(lengths.sum()) / 8
    full = plan_ranks(lengths, num_ranks=8, max_tokens=int(tokens / 5.98), width=1024)
    roomy = plan_ranks(lengths, num_ranks=8, max_tokens=int(tokens / 5.5), width=1024)
    assert (len(full[0]), len(roomy[0])) == (7, 6)
    assert waiting(loads_of(full, lengths, 1024)) < 0.02


def test_waiting_that_no_further_microbatch_would_end_costs_none() -> None:
    """One sequence is longer than all that the other rank has."""
    plan = plan_ranks(np.asarray([4000, 300, 200, 100], np.int64), num_ranks=2, max_tokens=8192)
    assert [[members.tolist() for members in rank] for rank in plan] == [[[0]], [[1, 2, 3]]]


def test_a_step_of_a_thousand_ranks_is_balanced() -> None:
    lengths = realistic_lengths(262_144, 0)
    plan = plan_ranks(lengths, num_ranks=1024, max_tokens=16_384)
    assert waiting(loads_of(plan, lengths)) < 0.02


def test_fewer_sequences_than_ranks_leave_ranks_empty() -> None:
    plan = plan_ranks(np.asarray([5, 3, 4], np.int64), num_ranks=5, max_tokens=100)
    assert [[members.tolist() for members in rank] for rank in plan] == [[[0]], [[2]], [[1]], [[]], [[]]]


@pytest.mark.parametrize(
    ("config", "width"),
    [
        ('{"hidden_size": 1536}', 1536),
        ('{"hidden_size": 1, "text_config": {"hidden_size": 2048}}', 2048),
        ("{}", WIDTH),
        ("no JSON", WIDTH),
        (None, WIDTH),
    ],
)
def test_a_models_own_width_is_taken_where_it_is_known(tmp_path: Path, config: str | None, width: int) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    assert model_width(str(tmp_path)) == width


def test_a_narrow_model_is_balanced_by_its_own_width() -> None:
    lengths = realistic_lengths(512, 0)
    own, other = (plan_ranks(lengths, num_ranks=8, max_tokens=8192, width=width) for width in (1024, WIDTH))
    assert waiting(loads_of(own, lengths, 1024)) < 0.02 < waiting(loads_of(other, lengths, 1024))


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=30),
    num_ranks=st.integers(1, 4),
    max_tokens=st.integers(20, 200),
    data=st.data(),
)
def test_groups_stay_whole_and_in_order(sizes: list[int], num_ranks: int, max_tokens: int, data: st.DataObject) -> None:
    number = sum(sizes)
    lengths = np.asarray(data.draw(st.lists(st.integers(1, 60), min_size=number, max_size=number)), np.int64)
    group_ids = np.repeat(np.arange(len(sizes)) * 3, sizes)
    plan = plan_ranks(lengths, num_ranks=num_ranks, max_tokens=max_tokens, groups=group_offsets(group_ids))
    assert len({len(rank) for rank in plan}) == 1
    microbatches = [members for rank in plan for members in rank]
    assert sorted(np.concatenate(microbatches).tolist()) == list(range(number))
    for members in microbatches:
        assert (np.diff(members) > 0).all()
        found = group_ids[members]
        assert found.tolist() == group_ids[np.isin(group_ids, found)].tolist()
        assert lengths[members].sum() <= max_tokens or len(set(found.tolist())) == 1
