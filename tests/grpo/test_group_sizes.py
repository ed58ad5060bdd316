"""Advantages of groups of different sizes in one batch: each is that of its own group, in float64."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.spi import ADVANTAGES
from rlcore_grpo.config import GrpoConfig
from rlcore_torchkit.rl.advantages import group_advantages

from .grpo_rollouts import make_grpo, make_rollouts

EPSILON = 1e-6


def expected(rewards, baseline, normalisation):
    """Advantages of one group, by exact fractions up to the root; rewards are of 0, 1/4, … 1."""
    size, exact = len(rewards), [Fraction(reward) for reward in rewards]
    mean = sum(exact) / size
    if len(set(exact)) == 1:
        return [0.0] * size
    baselines = [mean if baseline == "group_mean" else (sum(exact) - own) / (size - 1) for own in exact]
    divisor = 1.0
    if normalisation == "std":
        divisor = math.sqrt(sum((own - mean) ** 2 for own in exact) / (size - 1)) + EPSILON
    elif normalisation == "mean":
        divisor = float(mean) + EPSILON
    return [float(own - base) / divisor for own, base in zip(exact, baselines, strict=True)]


groups_of_sizes = st.lists(
    st.integers(1, 4).flatmap(lambda rounds: st.lists(st.integers(0, 4), min_size=2 * rounds, max_size=2 * rounds)),
    min_size=1,
    max_size=6,
)


@pytest.mark.parametrize(
    ("baseline", "normalisation"),
    [
        ("group_mean", "std"),
        ("group_mean", "none"),
        ("group_mean", "mean"),
        ("leave_one_out", "none"),
        ("leave_one_out", "std"),
    ],
)
@given(groups=groups_of_sizes)
def test_advantages_are_those_of_each_group_by_itself(baseline, normalisation, groups):
    rewards = [[number / 4 for number in group] for group in groups]
    ids = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    found = group_advantages(np.concatenate(rewards), ids, baseline=baseline, normalisation=normalisation, epsilon=EPSILON)
    wanted = [value for group in rewards for value in expected(group, baseline, normalisation)]
    assert found == pytest.approx(wanted, rel=1e-12, abs=1e-12)


@given(groups=groups_of_sizes)
def test_a_batch_of_several_sizes_has_the_advantages_of_batches_of_one_size(groups):
    rewards = [[number / 4 for number in group] for group in groups]
    algorithm = make_grpo(GrpoConfig(advantage_epsilon=EPSILON))

    def advantages(batch):
        ids = np.repeat(np.arange(len(batch)), [len(group) for group in batch])
        return algorithm.build_batch(make_rollouts(np.concatenate(batch), ids)).batch.token_columns[ADVANTAGES]

    assert advantages(rewards).tolist() == np.concatenate([advantages([group]) for group in rewards]).tolist()
