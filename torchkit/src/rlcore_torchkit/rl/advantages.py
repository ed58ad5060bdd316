"""Rewards to advantages, group by group: numpy on the driver, float64 inside, without a loop over groups.

Shapes: N samples, G groups. `group_of` int64 [N] is each sample's group, counted from 0 without gaps.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias, TypedDict, Unpack, assert_never, get_args

import numpy as np
from numpy.typing import NDArray

from rlcore.spi.errors import ContractError
from rlcore_torchkit.rl.loss_config import AdvantageNormalisation, Baseline

Float64Array: TypeAlias = NDArray[np.float64]

RELATIVE_RESOLUTION = 1e-6
"""Rewards of a group that differ by no more than this share of their magnitude are equal: about eight float32 roundings."""
SMALLEST_DIFFERENCE = 1e-12
"""Rewards that differ by no more than this are equal whatever their magnitude: parts of a reward that cancel, of turns or of
functions, leave roundings, such as 0.1 + 0.2 - 0.3, which is not 0 and would be scaled up to the size of other advantages."""


class AdvantageOptions(TypedDict):
    """Baseline and normalisation of advantages."""

    baseline: Baseline
    normalisation: AdvantageNormalisation
    epsilon: float


def group_advantages(
    rewards: NDArray[np.floating[Any]],
    group_ids: NDArray[np.integer[Any]],
    *,
    baseline: Baseline,
    normalisation: AdvantageNormalisation,
    epsilon: float,
) -> Float64Array:
    """float64 [N]: r_i - b_i, divided by the group's std + epsilon for "std" (DeepSeekMath, arXiv:2402.03300, section 4.1).

    b_i is the mean of the group, of its other rewards (RLOO, arXiv:2402.14740), of all N, or 0; the std is that of the whole
    group's rewards (ddof = 1) with either of the first two, so that advantages of a group of n sum to 0 and stay within
    (n-1)/√n, or √n for "leave_one_out". Groups of one, and those whose rewards are equal to rounding, get 0. `group_ids` are
    non-decreasing. Other divisors, each with epsilon added:

    - "leave_one_out_std": the std of the group's other rewards, which does not depend on r_i, but at least half the group's.
      Without a bound it is 0 but for rounding where one reward differs from equal others. Advantages stay within twice those
      of "std".
    - "batch_std": the std of all N rewards.
    - "mean": the group's mean reward, of rewards of at least 0 (MaxRL, arXiv:2602.02710); within n-1.
    - "batch_whitening", "sample_whitening": none here; see `whitened`.

    ContractError for another name.
    """
    _require_name("baseline", baseline, Baseline)
    _require_name("normalisation", normalisation, AdvantageNormalisation)
    if not len(rewards):
        return np.zeros(0)
    if baseline == "none":
        return rewards.astype(np.float64)
    if baseline == "batch_mean":
        group_ids = np.zeros(len(rewards), np.int64)
    starts, sizes, group_of = _groups(group_ids)
    shifted = rewards.astype(np.float64)
    magnitude = np.maximum.reduceat(np.abs(shifted), starts)
    # Relative to the group's least reward, so that a large common level cannot cancel away the differences.
    shifted -= np.minimum.reduceat(shifted, starts)[group_of]
    differs = np.maximum.reduceat(shifted, starts) > np.maximum(RELATIVE_RESOLUTION * magnitude, SMALLEST_DIFFERENCE)
    centred = shifted - (np.add.reduceat(shifted, starts) / sizes)[group_of]
    others = np.maximum(sizes - 1, 1)
    scale = differs.astype(np.float64)
    if baseline == "leave_one_out":
        scale *= sizes / others  # r - Σ_{j≠i} r_j / (n-1) = n/(n-1) · (r - mean)
    match normalisation:
        case "std" | "leave_one_out_std":
            std = np.sqrt(np.add.reduceat(centred**2, starts) / others)
            if normalisation == "leave_one_out_std":
                divisors = np.maximum(_std_of_others(centred, starts, sizes, group_of), std[group_of] / 2) + epsilon
                centred /= np.where(differs[group_of], divisors, 1.0)
            else:
                scale /= np.where(differs, std + epsilon, 1.0)
        case "batch_std":
            scale /= np.where(differs, _std(rewards.astype(np.float64)) + epsilon, 1.0)
        case "mean":
            means = np.add.reduceat(rewards.astype(np.float64), starts) / sizes
            scale /= np.where(differs, means + epsilon, 1.0)
        case "none" | "batch_whitening" | "sample_whitening":
            pass
        case _:
            assert_never(normalisation)
    return centred * scale[group_of]


def decoupled_advantages(
    components: Sequence[NDArray[np.floating[Any]]],
    weights: Sequence[float],
    group_ids: NDArray[np.integer[Any]],
    **options: Unpack[AdvantageOptions],
) -> Float64Array:
    """float64 [N]: (s_i - mean(s)) / (std(s) + epsilon) over all N, with s_i = Σ_k w_k a_ik and a_ik the `group_advantages` of
    reward component k (GDPO, arXiv:2601.05242).

    Each component is normalised in its group before they are added, so that a small one still tells samples apart where a
    large one does. 0 where all s are equal to rounding, and in a group where they are. `components` are M arrays of [N],
    `weights` M numbers.
    """
    total, magnitude = np.zeros(len(group_ids)), np.zeros(len(group_ids))
    for weight, component in zip(weights, components, strict=True):
        part = weight * group_advantages(component, group_ids, **options)
        total += part
        magnitude += np.abs(part)
    # Components that cancel leave roundings, which must not pass for differences.
    total[np.abs(total) <= RELATIVE_RESOLUTION * magnitude] = 0.0
    if not len(total):
        return total
    # What is left of the mean of all is no signal of a group that has none, on which alone no update is made: a rounding, or
    # more with "leave_one_out_std", whose advantages do not sum to 0.
    starts, _, group_of = _groups(group_ids)
    differs = np.maximum.reduceat(np.abs(total), starts) > 0
    return np.where(differs[group_of], whitened(total, epsilon=options["epsilon"]), 0.0)


def whitened(values: NDArray[np.floating[Any]], *, epsilon: float) -> Float64Array:
    """float64 [K]: (v - mean) / (std + epsilon) over all K values, of samples or of loss tokens (REINFORCE++,
    arXiv:2501.03262, global advantage normalisation; ddof = 1). 0 where they are equal to rounding; within √K."""
    if are_equal(values):
        return np.zeros(len(values))
    shifted = values.astype(np.float64) - np.min(values)
    white: Float64Array = (shifted - shifted.mean()) / (_std(shifted) + epsilon)
    return white


def are_equal(values: NDArray[np.floating[Any]]) -> bool:
    """Return whether values differ by no more than roundings; so does none at all."""
    if not len(values):
        return True
    resolution = max(RELATIVE_RESOLUTION * float(np.abs(values).max()), SMALLEST_DIFFERENCE)
    return bool(np.ptp(values.astype(np.float64)) <= resolution)


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


def process_advantages(
    rewards: NDArray[np.float32],
    num_turns: NDArray[np.int64],
    group_ids: NDArray[np.int32],
    **options: Unpack[AdvantageOptions],
) -> Float64Array:
    """float64 [K]: of each turn, Σ over it and the later turns of its episode of `group_advantages` of their rewards, which
    compare all turns of all episodes of a group (process supervision of DeepSeekMath, arXiv:2402.03300, section 4.1.3).

    Shapes as of `turn_advantages`. With one turn each it is group_advantages. A sum that cancels to rounding is 0.
    """
    normalised = group_advantages(rewards, np.repeat(group_ids, num_turns), **options)
    ends, magnitudes = np.cumsum(num_turns), np.abs(normalised)
    starts = np.repeat(ends - num_turns, num_turns)
    before = np.concatenate([[0.0], np.cumsum(normalised)])
    paid = np.concatenate([[0.0], np.cumsum(magnitudes)])
    to_go: Float64Array = np.repeat(before[ends], num_turns) - before[:-1]
    # Rewards that cancel leave roundings, which must not pass for differences.
    to_go[np.abs(to_go) <= RELATIVE_RESOLUTION * (np.repeat(paid[ends], num_turns) - paid[starts])] = 0.0
    return to_go


def _require_name(option: str, name: str, names: Any) -> None:
    if name not in get_args(names):
        raise ContractError(f"{option}: found {name!r}; expected one of {', '.join(get_args(names))}")


def _groups(group_ids: NDArray[np.integer[Any]]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """First sample and size of each group, and each sample's group counted from 0 without gaps."""
    begins = np.diff(group_ids, prepend=group_ids[0] - 1) != 0
    starts = np.flatnonzero(begins)
    return starts, np.diff(starts, append=len(group_ids)), np.cumsum(begins) - 1


def _std(values: Float64Array) -> float:
    """The standard deviation of all values (ddof = 1); 0 of a single one."""
    shifted = values - values.min()
    return float(np.sqrt(np.square(shifted - shifted.mean()).sum() / max(len(values) - 1, 1)))


def _std_of_others(
    centred: Float64Array, starts: NDArray[np.int64], sizes: NDArray[np.int64], group_of: NDArray[np.int64]
) -> Float64Array:
    """float64 [N]: the standard deviation (ddof = 1) of a group's values but one's own; 0 where fewer than two are left.

    Σ_{j≠i} (c_j - mean_{-i})² = Σ_j c_j² - n/(n-1) c_i², with c what `centred` holds: values less their group's mean.
    """
    squares = np.add.reduceat(centred**2, starts)
    left = squares[group_of] - (sizes / np.maximum(sizes - 1, 1))[group_of] * centred**2
    result: Float64Array = np.sqrt(np.maximum(left, 0.0) / np.maximum(sizes - 2, 1)[group_of])
    return result
