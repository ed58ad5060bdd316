"""Finds the tokens that lower the policy's entropy most: log-probability and advantage rise together there. numpy on the
driver, so that all tokens of a step are compared, whatever their microbatches.

The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models (arXiv:2505.22617). Shapes: n loss tokens.
"""

import numpy as np
from numpy.typing import NDArray

from rlcore.spi import ADVANTAGES, GENERATION_LOGPROBS, TokenBatch
from rlcore_torchkit.rl.loss_config import LossConfig

HIGH_COVARIANCE = "high_covariance"
"""float32 [T], a token column: 1.0 at the tokens that Clip-Cov and KL-Cov treat otherwise, else 0.0."""


def covariances(logprobs: NDArray[np.float32], advantages: NDArray[np.float32]) -> NDArray[np.float64]:
    """float64 [n]: (log π - its mean) · (A - its mean), whose mean is the covariance of the two."""
    if not len(logprobs):
        return np.zeros(0)
    logs, values = logprobs.astype(np.float64), advantages.astype(np.float64)
    products: NDArray[np.float64] = (logs - logs.mean()) * (values - values.mean())
    return products


def greatest(values: NDArray[np.float64], *, share: float) -> NDArray[np.bool_]:
    """bool [n]: the greatest `share` of the values, at least one (KL-Cov); of equal ones the first."""
    chosen = np.zeros(len(values), np.bool_)
    chosen[np.argsort(-values, kind="stable")[: _count(values, share)]] = True
    return chosen


def some_between(
    values: NDArray[np.float64], low: float, high: float, *, share: float, random: np.random.Generator
) -> NDArray[np.bool_]:
    """bool [n]: of the values in [low, high] as many as `share` of all values, at least one, drawn alike (Clip-Cov)."""
    chosen = np.zeros(len(values), np.bool_)
    candidates = np.flatnonzero((values >= low) & (values <= high))
    chosen[random.permutation(candidates)[: _count(values, share)]] = True
    return chosen


def _count(values: NDArray[np.float64], share: float) -> int:
    return max(int(share * len(values)), 1)


def high_covariance(config: LossConfig, batch: TokenBatch, *, seed: int, weight_version: int) -> NDArray[np.float32]:
    """float32 [T]: tokens chosen among the step's loss tokens by the sampler's probabilities and the column of advantages.

    The seed of the run and the version of the weights draw what is drawn, so that a resumed run draws it too.
    """
    mask, columns = batch.loss_mask, batch.token_columns
    values = covariances(columns[GENERATION_LOGPROBS][mask], columns[ADVANTAGES][mask])
    if config.objective == "kl_cov":
        chosen = greatest(values, share=config.covariance_share)
    else:
        low, high = config.covariance_minimum, config.covariance_maximum
        random = np.random.default_rng([seed, weight_version])
        chosen = some_between(values, low, high, share=config.covariance_share, random=random)
    column = np.zeros(batch.num_tokens, np.float32)
    column[mask] = chosen
    return column
