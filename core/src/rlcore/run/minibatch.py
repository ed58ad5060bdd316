"""Some sequences of a step's batch: what one update trains on."""

import numpy as np
from attrs import frozen

from rlcore.spi import GlobalCounts, TokenBatch
from rlcore.spi.arrays import Int64Array


@frozen(kw_only=True, eq=False)
class Minibatch:
    """Sequences by number: their tokens are copied once, where they are cut for the workers."""

    batch: TokenBatch
    """The step's."""
    sequences: Int64Array
    """int64 [M], ascending."""
    counts: GlobalCounts
    """Of these sequences."""
    schedule_step: int
    """Its place among the updates that the run plans, counted from 0."""

    @classmethod
    def of(cls, batch: TokenBatch, sequences: Int64Array, num_loss_tokens: Int64Array, schedule_step: int) -> "Minibatch":
        """Some sequences, given the loss tokens of each of the batch's, int64 [N]."""
        own = num_loss_tokens[sequences]
        counts = GlobalCounts(num_loss_tokens=int(own.sum()), num_loss_sequences=int(np.count_nonzero(own)))
        return cls(batch=batch, sequences=sequences, counts=counts, schedule_step=schedule_step)
