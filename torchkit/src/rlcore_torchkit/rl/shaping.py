"""Deductions from rewards on the driver: penalties of length, and of the KL divergence from the reference policy; and weights
of the samples whose likelihood is raised.

Shapes: E episodes, N sequences, T tokens; float64 throughout.
"""

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlcore.spi import TokenBatch
from rlcore_torchkit.rl.loss_config import KlEstimator

Float64Array: TypeAlias = NDArray[np.float64]
Lengths: TypeAlias = NDArray[np.int64]


LIKELIHOOD_WEIGHTS = "likelihood_weights"
"""float32 [T], a token column: at the loss tokens of samples with a reward above 0, the step's loss tokens over those of such
samples; else 0.0. The mean of it times -log p over all loss tokens is the mean of -log p over those of such samples."""


def likelihood_weights(batch: TokenBatch, rewards: NDArray[np.floating[Any]]) -> NDArray[np.float32]:
    """The column of these; `rewards` [N] are those of each sequence's episode."""
    chosen = batch.loss_mask & np.repeat(rewards > 0, batch.lengths)
    share = batch.loss_mask.sum() / max(chosen.sum(), 1)
    return np.where(chosen, np.float32(share), np.float32(0))


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
    policy: NDArray[np.floating[Any]], reference: NDArray[np.floating[Any]], *, estimator: KlEstimator
) -> Float64Array:
    """float64 [T]: the loss's own estimates of the divergence of the policy from the reference, by log-probabilities [T]."""
    import torch  # here alone: the driver needs it only where rewards have a KL divergence

    from rlcore_torchkit.rl.policy_gradient import kl_estimate

    estimates: Float64Array = kl_estimate(torch.from_numpy(reference.astype(np.float64) - policy), estimator).numpy()
    return estimates


def sums_to_go(values: Float64Array, offsets: NDArray[np.int64]) -> Float64Array:
    """float64 [T]: Σ_{i≥t} values_i within each sequence. `offsets` int64 [N+1]."""
    ends = np.repeat(offsets[1:], np.diff(offsets))
    before = np.concatenate([[0.0], np.cumsum(values)])
    to_go: Float64Array = before[ends] - before[:-1]
    return to_go
