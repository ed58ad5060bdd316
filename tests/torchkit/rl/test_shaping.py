"""Penalties of length and of the KL divergence against plain float64 references."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore_torchkit.rl.shaping import (
    group_length_reward,
    kl_estimates,
    linear_length_penalty,
    soft_overlong_penalty,
    sums_to_go,
)

lengths_of_any_size = st.lists(st.integers(0, 300), min_size=1, max_size=20)


@given(lengths_of_any_size, st.integers(1, 200), st.floats(0.01, 1))
def test_overlong_answers_lose_by_how_far_they_reach_into_the_buffer(lengths, max_length, share):
    """DAPO (arXiv:2503.14476), equation 13, case by case."""
    buffer = share * max_length

    def penalty(length):
        if length <= max_length - buffer:
            return 0.0
        return (max_length - buffer - length) / buffer if length <= max_length else -1.0

    found = soft_overlong_penalty(np.array(lengths), max_length=max_length, buffer=buffer)
    np.testing.assert_allclose(found, list(map(penalty, lengths)), rtol=1e-9, atol=1e-9)


@given(lengths_of_any_size, st.integers(1, 200))
def test_the_linear_penalty_is_the_share_of_the_limit(lengths, max_length):
    found = linear_length_penalty(np.array(lengths), max_length=max_length)
    assert found == pytest.approx([-min(length / max_length, 1.0) for length in lengths])


@settings(max_examples=40)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 9), st.sampled_from([-1.0, 0.0, 0.5, 1.0])), min_size=1, max_size=5),
        min_size=1,
        max_size=4,
    )
)
def test_in_a_group_short_answers_gain_and_wrong_ones_never_do(groups):
    """Kimi k1.5 (arXiv:2501.12599), section 2.3.3: λ for a correct answer, min(0, λ) for a wrong one, 0 where max = min."""
    expected = []
    for group in groups:
        shortest, longest = min(length for length, _ in group), max(length for length, _ in group)
        for length, reward in group:
            share = 0.5 - (length - shortest) / (longest - shortest) if longest > shortest else 0.0
            expected.append(share if reward > 0 else min(0.0, share))
    pairs = [pair for group in groups for pair in group]
    lengths, rewards = np.array([length for length, _ in pairs]), np.array([reward for _, reward in pairs], np.float32)
    ids = np.repeat(range(len(groups)), list(map(len, groups)))
    found = group_length_reward(lengths, rewards, ids)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)
    assert np.abs(found).max() <= 0.5


def test_no_episodes_have_no_length_reward():
    assert group_length_reward(np.zeros(0, np.int64), np.zeros(0), np.zeros(0, np.int32)).shape == (0,)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@given(st.lists(st.tuples(st.floats(-30, 0, width=32), st.floats(-30, 0, width=32)), min_size=1, max_size=9))
def test_estimates_match_schulmans_formulas(estimator, pairs):
    """With r = reference / policy probability: k1 = -log r, k2 = (log r)^2 / 2, k3 = r - 1 - log r; bounded as in the loss."""

    def estimate(policy, reference):
        delta = min(max(reference - policy, -20.0), 20.0)
        value = {"k1": -delta, "k2": delta**2 / 2, "k3": math.exp(delta) - 1 - delta}[estimator]
        return min(max(value, -10.0), 10.0)

    policy, reference = np.array(pairs, np.float32).T
    found = kl_estimates(policy, reference, estimator=estimator)
    expected = [estimate(float(p), float(r)) for p, r in zip(policy, reference, strict=True)]
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


@given(st.lists(st.lists(st.floats(-9, 9), min_size=1, max_size=6), max_size=5))
def test_sums_run_from_each_token_to_the_end_of_its_sequence(sequences):
    offsets = np.array([0, *itertools.accumulate(map(len, sequences))], np.int64)
    values = np.array([value for sequence in sequences for value in sequence], np.float64)
    expected = [math.fsum(sequence[place:]) for sequence in sequences for place in range(len(sequence))]
    np.testing.assert_allclose(sums_to_go(values, offsets), expected, rtol=1e-9, atol=1e-12)
