"""Loss tokens of episodes that have several sequences, as a column that losses normalise by."""

import numpy as np
from attrs import evolve

from rlcore.spi import EPISODE_IDS, TokenBatch

EPISODE_TOKENS = "episode_tokens"
"""int32 [N], a sequence column: loss tokens of the sequence's episode, in all of its sequences."""


def with_episode_tokens(batch: TokenBatch) -> TokenBatch:
    """Return the batch with the column EPISODE_TOKENS, where an episode may have several sequences."""
    episodes = batch.sequence_columns.get(EPISODE_IDS)
    if episodes is None:
        return batch
    _, index = np.unique(episodes, return_inverse=True)
    tokens = np.bincount(index, batch.loss_lengths)[index].astype(np.int32)
    return evolve(batch, sequence_columns={**batch.sequence_columns, EPISODE_TOKENS: tokens})
