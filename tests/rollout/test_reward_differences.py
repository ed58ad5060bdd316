"""Rewards that differ, those that roundings alone tell apart, and what of them an algorithm compares."""

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from rlcore_rollout.episode_group import Compared, differ, has_reward_variance

REWARDS = [
    ((), False),
    ((0.5,), False),
    ((0.0, 0.0), False),
    ((0.0, 1e-9), True),
    ((0.1 + 0.2 - 0.3, 0.0), False),
    ((0.1 + 0.2, 0.3), False),
    ((-(0.1 + 0.2), -0.3), False),
    ((1000.0, 1000.01), True),
    ((1.0, 1.0, 0.0), True),
    ((-1.0, 1.0), True),
]
"""Rewards of a group, and whether they differ."""


@pytest.mark.parametrize(("rewards", "expected"), REWARDS)
def test_roundings_make_no_difference(rewards: Sequence[float], expected: bool) -> None:
    assert differ(rewards) is expected


@pytest.mark.parametrize(("rewards", "expected"), REWARDS)
def test_advantages_compare_rewards_alike(rewards: Sequence[float], expected: bool) -> None:
    advantages = pytest.importorskip("rlcore_torchkit.rl.advantages", reason="torch compares them")
    assert advantages.are_equal(np.array(rewards)) is not expected


@pytest.mark.parametrize(
    ("rewards", "compared", "expected"),
    [
        (((1.0, 0.0), (0.0, 1.0)), "rewards", False),
        (((1.0, 0.0), (0.0, 1.0)), "turn_rewards", True),
        (((1.0, 0.0), (1.0, 0.0)), "turn_rewards", False),
        (((1.0,), (1.0, 0.0)), "turn_rewards", False),  # the second turn has no other to compare with
        (((1.0,), (0.5, 0.5), (0.25, 0.75)), "turn_rewards", True),
        (((0.1, 0.2, -0.3), (0.0, 0.0, 0.0)), "rewards", False),  # the sum is a rounding
        (((0.1 + 0.2, -0.3), (0.3, -0.3)), "turn_rewards", False),
        (((1.0, 0.0),), "turn_rewards", False),
        ((), "turn_rewards", False),
        ((), "rewards", False),
    ],
)
def test_samples_are_told_apart_by_what_is_compared(
    rewards: Sequence[Sequence[float]], compared: Compared, expected: bool
) -> None:
    parts = [{"all": sum(of_turns)} for of_turns in rewards]
    assert has_reward_variance(rewards, parts, compared) is expected


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (({"x": 1.0}, {"y": 1.0}), True),
        (({"x": 1.0, "y": 0.0}, {"x": 1.0}), False),
        (({"x": 0.1 + 0.2, "y": 1.0}, {"x": 0.3, "y": 1.0}), False),
        (({"x": 1.0, "y": 2.0},), False),
        (({}, {}), False),
        ((), False),
    ],
)
def test_samples_are_told_apart_by_each_part_of_their_rewards(parts: Sequence[Mapping[str, float]], expected: bool) -> None:
    assert has_reward_variance([(1.0,)] * len(parts), parts, "reward_components") is expected


def test_without_parts_the_whole_is_compared() -> None:
    """So that the algorithm, which gets such a group, says what is missing."""
    assert has_reward_variance([(1.0,), (0.0,)], [{}, {}], "reward_components")
