"""Tokens that Clip-Cov and KL-Cov choose (arXiv:2505.22617)."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore_torchkit.rl.covariance import covariances, greatest, some_between

seeds = st.integers(0, 10**6)


def draw(seed, size=200):
    random = np.random.default_rng(seed)
    return (-random.exponential(1.0, size)).astype(np.float32), random.normal(0, 1, size).astype(np.float32)


@settings(max_examples=25)
@given(seed=seeds)
def test_their_mean_is_the_covariance(seed):
    logprobs, advantages = draw(seed)
    expected = np.cov(np.float64(logprobs), np.float64(advantages), ddof=0)[0, 1]
    assert covariances(logprobs, advantages).mean() == pytest.approx(expected, rel=1e-9, abs=1e-12)


@settings(max_examples=25)
@given(seed=seeds, share=st.floats(0.001, 1))
def test_the_greatest_are_a_share_of_all_and_above_the_others(seed, share):
    values = covariances(*draw(seed))
    chosen = greatest(values, share=share)
    assert chosen.sum() == max(int(share * len(values)), 1)
    if not chosen.all():
        assert values[chosen].min() >= values[~chosen].max()


@settings(max_examples=25)
@given(seed=seeds, share=st.floats(0.001, 1))
def test_those_between_bounds_are_drawn_by_the_seed_alone(seed, share):
    values = covariances(*draw(seed))
    chosen, again = (some_between(values, 0.1, 0.5, share=share, random=np.random.default_rng(7)) for _ in range(2))
    np.testing.assert_array_equal(chosen, again)
    candidates = (values >= 0.1) & (values <= 0.5)
    assert not (chosen & ~candidates).any()
    assert chosen.sum() == min(candidates.sum(), max(int(share * len(values)), 1))


def test_each_candidate_is_drawn_as_often():
    values = np.array([0.0, 2.0, 3.0, 4.0, 9.0])
    random = np.random.default_rng(0)
    counts = sum(some_between(values, 1.0, 5.0, share=0.3, random=random).astype(int) for _ in range(3000))
    assert counts[[0, 4]].tolist() == [0, 0]
    np.testing.assert_allclose(counts[1:4], 1000, atol=120)


def test_no_tokens_have_none():
    nothing = np.zeros(0, np.float32)
    values = covariances(nothing, nothing)
    assert not len(greatest(values, share=0.5))
    assert not len(some_between(values, 0.0, 1.0, share=0.5, random=np.random.default_rng(0)))
