"""The order in which steps take rows."""

from functools import lru_cache

import numpy as np
from attrs import frozen

from rlcore.run.data.seeds import Stream
from rlcore.spi.arrays import Int64Array


@frozen(kw_only=True)
class PromptStream:
    """Which rows each step takes: a function of the seed and the step alone, so that resuming needs no state.

    The rows are gone through epoch by epoch, shuffled anew for each; a batch may end one epoch and begin the next.
    """

    num_rows: int
    """The number of rows, at least 1."""
    batch_size: int
    """Rows of a step; may exceed num_rows."""
    seed: int
    shuffle: bool

    def indices(self, step: int) -> Int64Array:
        """int64 [batch_size]: row numbers of a step; steps count from 0."""
        return self._rows(step * self.batch_size, (step + 1) * self.batch_size)

    def following(self, step: int) -> Int64Array:
        """int64 [num_rows]: all rows in the order in which they come after a step, each once, and the step's own last: what
        takes the place of a step's row repeats no other while there is one that the step does not have."""
        end = (step + 1) * self.batch_size
        coming = self._rows(end, end + 2 * self.num_rows)  # holds a whole epoch
        _, first = np.unique(coming, return_index=True)
        rows = coming[np.sort(first)]
        own = np.isin(rows, self.indices(step))
        return np.concatenate([rows[~own], rows[own]])

    def _rows(self, position: int, end: int) -> Int64Array:
        parts = []
        while position < end:
            epoch, within = divmod(position, self.num_rows)
            order = _epoch_order(self.num_rows, self.seed, epoch) if self.shuffle else np.arange(self.num_rows, dtype=np.int64)
            parts.append(order[within : within + end - position])
            position += len(parts[-1])
        return np.concatenate(parts)

    def epoch(self, step: int) -> int:
        """The epoch that the step's first row belongs to; both count from 0."""
        return step * self.batch_size // self.num_rows


@lru_cache(maxsize=4)  # steps follow each other within an epoch; shuffling a million rows again for each is slow
def _epoch_order(num_rows: int, seed: int, epoch: int) -> Int64Array:
    return np.random.default_rng([seed, Stream.DATA, epoch]).permutation(num_rows)
