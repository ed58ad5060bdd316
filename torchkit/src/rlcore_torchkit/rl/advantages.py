"""Rewards to advantages, group by group: numpy on the driver, float64 inside, without a loop over groups.

Shapes: N samples, G groups. `group_of` int64 [N] is each sample's group, counted from 0 without gaps.
"""

from typing import Any, Literal, TypeAlias, TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray

Float64Array: TypeAlias = NDArray[np.float64]

RELATIVE_RESOLUTION = 1e-6
"""Rewards of a group that differ by no more than this share of their magnitude are equal: about eight float32 roundings."""


class AdvantageOptions(TypedDict):
    """What advantages of a group are taken against, and divided by."""

    baseline: Literal["group_mean", "leave_one_out"]
    normalisation: Literal["std", "none"]
    epsilon: float


def group_advantages(
    rewards: NDArray[np.floating[Any]],
    group_ids: NDArray[np.integer[Any]],
    *,
    baseline: Literal["group_mean", "leave_one_out"],
    normalisation: Literal["std", "none"],
    epsilon: float,
) -> Float64Array:
    """float64 [N]: r_i - b_i, divided by the group's std + epsilon for "std" (DeepSeekMath, arXiv:2402.03300, section 4.1).

    b_i is the mean of the group, or of its other rewards (RLOO, arXiv:2402.14740); the std is that of the whole group's
    rewards (ddof = 1) with either, so that advantages of a group of n sum to 0 and stay within (n-1)/√n, or √n for
    "leave_one_out". Groups of one, and those whose rewards are equal to rounding, get 0. `group_ids` are non-decreasing.
    """
    if not len(rewards):
        return np.zeros(0)
    starts, sizes, group_of = _groups(group_ids)
    shifted = rewards.astype(np.float64)
    magnitude = np.maximum.reduceat(np.abs(shifted), starts)
    # Relative to the group's least reward, so that a large common level cannot cancel away the differences.
    shifted -= np.minimum.reduceat(shifted, starts)[group_of]
    differs = np.maximum.reduceat(shifted, starts) > RELATIVE_RESOLUTION * magnitude
    centred = shifted - (np.add.reduceat(shifted, starts) / sizes)[group_of]
    others = np.maximum(sizes - 1, 1)
    scale = differs.astype(np.float64)
    if baseline == "leave_one_out":
        scale *= sizes / others  # r - Σ_{j≠i} r_j / (n-1) = n/(n-1) · (r - mean)
    if normalisation == "std":
        std = np.sqrt(np.add.reduceat(centred**2, starts) / others)
        scale /= np.where(differs, std + epsilon, 1.0)
    return centred * scale[group_of]


def turn_advantages(
    rewards: NDArray[np.float32],
    num_turns: NDArray[np.int64],
    group_ids: NDArray[np.int32],
    **options: Unpack[AdvantageOptions],
) -> Float64Array:
    """float64 [K]: of each turn, `group_advantages` of its reward-to-go among the turns of its group with the same number.

    The reward-to-go of episode i's turn k is G_ik = Σ_{l≥k} r_il, undiscounted (Williams, 1992; Sutton and Barto, 2018, section
    13.3): what a turn could not change is no part of its advantage. The baseline depends on group and k alone (section 13.4).
    With one turn each it is group_advantages. A turn that no other episode of its group has gets 0. `rewards` [K] are those of
    all N episodes' turns, in order; `num_turns` and non-decreasing `group_ids` are [N].
    """
    if not len(rewards):
        return np.zeros(0)
    ends = np.cumsum(num_turns)
    before = np.concatenate([[0.0], np.cumsum(rewards, dtype=np.float64)])
    to_go = np.repeat(before[ends], num_turns) - before[:-1]
    paid = np.concatenate([[0.0], np.cumsum(np.abs(rewards), dtype=np.float64)])
    # Rewards that cancel leave roundings, which must not pass for differences.
    to_go[np.abs(to_go) <= RELATIVE_RESOLUTION * np.repeat(paid[ends] - paid[ends - num_turns], num_turns)] = 0.0
    number = np.arange(len(rewards)) - np.repeat(ends - num_turns, num_turns)
    cells = np.repeat(group_ids, num_turns).astype(np.int64) * (int(num_turns.max()) + 1) + number
    order = np.argsort(cells, kind="stable")
    advantages = np.zeros(len(rewards))
    advantages[order] = group_advantages(to_go[order], cells[order], **options)
    return advantages


def _groups(group_ids: NDArray[np.integer[Any]]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """First sample and size of each group, and each sample's group counted from 0 without gaps."""
    begins = np.diff(group_ids, prepend=group_ids[0] - 1) != 0
    starts = np.flatnonzero(begins)
    return starts, np.diff(starts, append=len(group_ids)), np.cumsum(begins) - 1
