"""Advantages of steps by their definition, a sum over all later steps, in plain Python."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore_torchkit.rl.gae import explained_variance, generalized_advantages

numbers = st.floats(-5, 5)
episodes_of_any_length = st.lists(st.tuples(st.lists(st.tuples(numbers, numbers), max_size=7), numbers), min_size=1, max_size=6)


def definition(steps, last_value, gamma, gae_lambda):
    """arXiv:1506.02438, equations 10 and 16: Σ_l (γλ)^l (r_{k+l} + γ V_{k+l+1} - V_{k+l})."""
    rewards, values = [reward for reward, _ in steps], [value for _, value in steps] + [last_value]
    deltas = [reward + gamma * values[k + 1] - values[k] for k, reward in enumerate(rewards)]
    return [
        sum((gamma * gae_lambda) ** (k - start) * deltas[k] for k in range(start, len(deltas))) for start in range(len(deltas))
    ]


def call(episodes, gamma, gae_lambda):
    steps = np.array([step for steps, _ in episodes for step in steps], np.float64).reshape(-1, 2)
    num_steps = np.array([len(steps) for steps, _ in episodes])
    last_values = np.array([last for _, last in episodes])
    return generalized_advantages(steps[:, 0], steps[:, 1], num_steps, last_values, gamma=gamma, gae_lambda=gae_lambda)


@given(episodes_of_any_length, st.floats(0.1, 1), st.floats(0, 1))
def test_advantages_are_the_sums_of_the_definition(episodes, gamma, gae_lambda):
    expected = [a for steps, last in episodes for a in definition(steps, last, gamma, gae_lambda)]
    np.testing.assert_allclose(call(episodes, gamma, gae_lambda), expected, rtol=1e-9, atol=1e-9)


@given(episodes_of_any_length)
def test_with_both_at_1_returns_are_what_was_earned_from_there_on(episodes):
    values = [value for steps, _ in episodes for _, value in steps]
    earned = [sum(reward for reward, _ in steps[k:]) + last for steps, last in episodes for k in range(len(steps))]
    np.testing.assert_allclose(call(episodes, 1.0, 1.0) + values, earned, rtol=1e-9, atol=1e-9)


def test_no_episode_has_no_advantage():
    none = np.zeros(0)
    assert generalized_advantages(none, none, np.zeros(0, int), none, gamma=1.0, gae_lambda=1.0).shape == (0,)


@given(st.lists(st.tuples(numbers, numbers), min_size=2, max_size=30), st.floats(-100, 100))
def test_explained_variance_is_one_less_the_share_of_the_errors(pairs, shift):
    predictions, targets = np.array(pairs).T
    if np.ptp(targets) < 1e-3:
        targets[0] += 1
    errors = targets - predictions
    mean, mean_error = sum(targets) / len(targets), sum(errors) / len(errors)
    expected = 1 - sum((e - mean_error) ** 2 for e in errors) / sum((t - mean) ** 2 for t in targets)
    assert explained_variance(predictions, targets) == pytest.approx(expected, rel=1e-6, abs=1e-6)
    # A critic that is off by the same everywhere explains all that differs.
    assert explained_variance(targets + shift, targets) == pytest.approx(1.0, abs=1e-6)


def test_equal_targets_leave_nothing_to_explain():
    assert explained_variance(np.array([1.0, 2.0]), np.array([3.0, 3.0])) == 0.0
    assert explained_variance(np.zeros(0), np.zeros(0)) == 0.0
