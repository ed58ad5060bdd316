"""Rewards that differ, and those that roundings alone tell apart."""

from collections.abc import Sequence

import numpy as np
import pytest

from rlcore.run.rollout.reward_differences import differ
from rlcore_torchkit.rl.advantages import are_equal


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ((), False),
        ((0.5,), False),
        ((0.0, 0.0), False),
        ((0.0, 1e-9), True),
        ((0.1 + 0.2, 0.3), False),
        ((-(0.1 + 0.2), -0.3), False),
        ((1000.0, 1000.01), True),
        ((1.0, 1.0, 0.0), True),
        ((-1.0, 1.0), True),
    ],
)
def test_roundings_make_no_difference(rewards: Sequence[float], expected: bool) -> None:
    assert differ(rewards) is expected
    assert are_equal(np.array(rewards)) is not expected, "as advantages compare them"
