"""Rewards and values to advantages, step by step: numpy on the driver, float64 throughout.

Shapes: E episodes, K steps of all episodes, one after another. A step is a token that the policy generated; what an environment
said in between is none.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Float64Array = NDArray[np.float64]


def generalized_advantages(
    rewards: NDArray[np.floating[Any]],
    values: NDArray[np.floating[Any]],
    num_steps: NDArray[np.integer[Any]],
    last_values: NDArray[np.floating[Any]],
    *,
    gamma: float,
    gae_lambda: float,
) -> Float64Array:
    """float64 [K]: A_k = Σ_{l≥0} (γλ)^l δ_{k+l} within an episode, δ_k = r_k + γ V_{k+1} - V_k (arXiv:1506.02438, equation 16).

    `rewards` [K] are what each step earned, `values` [K] those of the states before it, `num_steps` [E] the steps of each
    episode, maybe 0, and `last_values` [E] the value behind an episode's last step: 0 where it truly ended there.
    """
    ends = np.cumsum(num_steps)
    following = np.zeros(len(values))
    following[:-1] = values[1:]
    has_steps = np.asarray(num_steps) > 0
    following[ends[has_steps] - 1] = last_values[has_steps]
    deltas = rewards + gamma * following - values
    # All episodes at once, from their last steps on; the longest first, so that those under way are always the first ones.
    order = np.argsort(-np.asarray(num_steps), kind="stable")
    last, remaining = ends[order] - 1, np.asarray(num_steps)[order]
    advantages, carried = np.zeros(len(values)), np.zeros(len(order))
    num_open = np.searchsorted(-remaining, -np.arange(remaining.max(initial=0)), side="left")
    for back, count in enumerate(num_open):
        steps = last[:count] - back
        carried[:count] = deltas[steps] + gamma * gae_lambda * carried[:count]
        advantages[steps] = carried[:count]
    return advantages


def explained_variance(predictions: NDArray[np.floating[Any]], targets: NDArray[np.floating[Any]]) -> float:
    """1 - Var(targets - predictions) / Var(targets), both [K]: 1 is a perfect prediction, 0 none; below 0 it is worse than
    none. 0.0 where all targets are equal."""
    wanted = targets.astype(np.float64)
    variance = float(wanted.var()) if len(wanted) else 0.0
    return 1.0 - float((wanted - predictions).var()) / variance if variance > 0.0 else 0.0
