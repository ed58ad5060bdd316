"""The column that names the tokens which Clip-Cov and KL-Cov treat otherwise."""

import numpy as np
from numpy.typing import NDArray

from rlcore.spi import ADVANTAGES, GENERATION_LOGPROBS, TokenBatch
from rlcore_grpo.loss_config import LossConfig
from rlcore_torchkit.rl.covariance import covariances, greatest, some_between

HIGH_COVARIANCE = "high_covariance"
"""float32 [T]: 1.0 at the tokens chosen, else 0.0."""


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
