"""What is taken off rewards on the driver: penalties of length, and of the KL divergence from the reference policy.

Shapes: E episodes, N sequences, T tokens; float64 throughout.
"""

from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

Float64Array: TypeAlias = NDArray[np.float64]
Lengths: TypeAlias = NDArray[np.int64]

MAX_LOG_RATIO = 20.0
MAX_KL = 10.0


def soft_overlong_penalty(lengths: Lengths, *, max_length: int, buffer: float) -> Float64Array:
    """float64 [E], of -1 to 0: 0 up to max_length - buffer tokens, then linearly to -1 at max_length, and -1 beyond (DAPO,
    arXiv:2503.14476, equation 13). `buffer` is in tokens, above 0."""
    return -np.clip((lengths - (max_length - buffer)) / buffer, 0.0, 1.0)


def linear_length_penalty(lengths: Lengths, *, max_length: int) -> Float64Array:
    """float64 [E], of -1 to 0: minus the share of max_length tokens that an episode takes, -1 beyond."""
    return -np.minimum(lengths / max_length, 1.0)


def group_length_reward(
    lengths: Lengths, rewards: NDArray[np.floating[Any]], group_ids: NDArray[np.integer[Any]]
) -> Float64Array:
    """float64 [E], of -0.5 to 0.5: λ = 0.5 - (length - min) / (max - min) over the lengths of its group where the reward is
    above 0, and min(0, λ) elsewhere; 0 in a group whose lengths are equal (Kimi k1.5, arXiv:2501.12599, section 2.3.3).

    It takes a reward above 0 for a correct answer. `group_ids` are non-decreasing.
    """
    if not len(lengths):
        return np.zeros(0)
    begins = np.diff(group_ids, prepend=group_ids[0] - 1) != 0
    starts, group_of = np.flatnonzero(begins), np.cumsum(begins) - 1
    shortest = np.minimum.reduceat(lengths, starts)[group_of]
    spread = np.maximum.reduceat(lengths, starts)[group_of] - shortest
    share = 0.5 - (lengths - shortest) / np.maximum(spread, 1)
    share = np.where(spread > 0, share, 0.0)
    return np.where(rewards > 0, share, np.minimum(share, 0.0))


def kl_estimates(
    policy: NDArray[np.floating[Any]], reference: NDArray[np.floating[Any]], *, estimator: Literal["k1", "k2", "k3"]
) -> Float64Array:
    """float64 [T]: k1 = -Δ, k2 = Δ²/2 or k3 = e^Δ - 1 - Δ, Δ = reference - policy log-probability (Schulman, "Approximating KL
    Divergence"). Δ is clamped to ±20 and the estimate to ±10, as in `rlcore_torchkit.rl.kl`."""
    delta = np.clip(reference.astype(np.float64) - policy, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    match estimator:
        case "k1":
            estimate = -delta
        case "k2":
            estimate = delta**2 / 2
        case "k3":
            estimate = np.expm1(delta) - delta
    return np.clip(estimate, -MAX_KL, MAX_KL)


def sums_to_go(values: Float64Array, offsets: NDArray[np.int64]) -> Float64Array:
    """float64 [T]: Σ_{i≥t} values_i within each sequence. `offsets` int64 [N+1]."""
    ends = np.repeat(offsets[1:], np.diff(offsets))
    before = np.concatenate([[0.0], np.cumsum(values)])
    to_go: Float64Array = before[ends] - before[:-1]
    return to_go
