"""The order in which steps take rows."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from rlcore.spi.arrays import Int64Array


class RandomPurpose(IntEnum):
    """The purpose of a random draw; the second element of a numpy SeedSequence key. Each purpose and step has its own
    stream, so that a resumed run draws what the first would have drawn."""

    DATA = 0
    ROLLOUTS = 1
    EVALUATION = 2
    MINIBATCHES = 3
    CURRICULUM = 4


WEYL = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio: its multiples, modulo 2**64, fall evenly between 0 and 2**64."""
CHUNK = 65536


@frozen(kw_only=True)
class PromptOrder(ABC):
    """Which rows each step takes: a function of the seed and the step alone, so that resuming needs no state."""

    num_rows: int
    """The number of rows, at least 1."""
    batch_size: int
    """Rows of a step; may exceed num_rows."""
    seed: int
    shuffle: bool

    @abstractmethod
    def rows(self, position: int, end: int) -> Int64Array:
        """int64 [end - position]: row numbers from one place of the order to another."""

    def indices(self, step: int) -> Int64Array:
        """int64 [batch_size]: row numbers of a step; steps count from 0."""
        return self.rows(step * self.batch_size, (step + 1) * self.batch_size)

    def following(self, step: int) -> Int64Array:
        """int64 [num_rows]: as `others`, behind a step."""
        return self.others((step + 1) * self.batch_size, self.indices(step))

    def others(self, end: int, own: Int64Array) -> Int64Array:
        """int64 [num_rows]: all rows in the order in which they come from a place on, each once, and those of `own` last: what
        takes the place of one of these repeats no other while there is one that is not among them."""
        coming = self.rows(end, end + 2 * self.num_rows)  # holds a whole epoch, unless some are rarer than others
        _, first = np.unique(np.concatenate([coming, np.arange(self.num_rows)]), return_index=True)
        rows = np.concatenate([coming, np.arange(self.num_rows)])[np.sort(first)]
        is_own = np.isin(rows, own)
        return np.concatenate([rows[~is_own], rows[is_own]])


@frozen(kw_only=True)
class PromptStream(PromptOrder):
    """The rows epoch by epoch, shuffled anew for each; a batch may end one epoch and begin the next."""

    number: int = 0
    """Which of several data sets it is: each is shuffled by itself."""

    def rows(self, position: int, end: int) -> Int64Array:
        """See PromptOrder."""
        parts = []
        while position < end:
            epoch, within = divmod(position, self.num_rows)
            order = np.arange(self.num_rows, dtype=np.int64)
            if self.shuffle:
                order = _epoch_order(self.num_rows, self.seed, epoch, self.number)
            parts.append(order[within : within + end - position])
            position += len(parts[-1])
        return np.concatenate([np.zeros(0, np.int64), *parts])

    def epoch(self, step: int) -> int:
        """The epoch that the step's first row belongs to; both count from 0."""
        return step * self.batch_size // self.num_rows


@frozen(kw_only=True)
class MixedStream(PromptOrder):
    """Several data sets, whose rows are numbered one set after another. Place i of the order is the set's in whose share of
    0 to 1 the number (i + 1)/φ + c lies, modulo 1, with c from the seed: any n places in a row have the weights' share of
    each set, but for about log n. Each set's own rows come as in PromptStream."""

    sizes: tuple[int, ...]
    """Rows of each set, each at least 1."""
    weights: tuple[float, ...]
    """Above 0; only their ratios matter."""

    def rows(self, position: int, end: int) -> Int64Array:
        """See PromptOrder."""
        ends = np.cumsum(np.asarray(self.weights) / sum(self.weights))[:-1]
        bounds = tuple(min(int(share * 2**64), 2**64 - 1) for share in ends)
        chunk, within = divmod(position, CHUNK)
        sets = _sets(bounds, self.seed, chunk * CHUNK, end)
        before = _counts(bounds, self.seed, chunk) + np.bincount(sets[:within], minlength=len(self.sizes))
        sets, found, first = sets[within:], np.zeros(end - position, np.int64), 0
        for number, (size, begun) in enumerate(zip(self.sizes, before.tolist(), strict=True)):
            places = sets == number
            own = PromptStream(num_rows=size, batch_size=1, seed=self.seed, shuffle=self.shuffle, number=number + 1)
            found[places] = first + own.rows(begun, begun + int(places.sum()))
            first += size
        return found


def _sets(bounds: Sequence[int], seed: int, position: int, end: int) -> NDArray[np.int64]:
    """int64 [end - position]: the set of each place. All is computed in integers, modulo 2**64."""
    offset = np.random.SeedSequence([seed, RandomPurpose.DATA]).generate_state(1, np.uint64)
    points = np.arange(position + 1, end + 1, dtype=np.uint64) * np.uint64(WEYL) + offset
    return np.searchsorted(np.asarray(bounds, np.uint64), points, side="right").astype(np.int64)


@lru_cache(maxsize=1024)
def _counts(bounds: tuple[int, ...], seed: int, chunk: int) -> Int64Array:
    """int64 [sets]: places of each set before a chunk."""
    counts = np.zeros(len(bounds) + 1, np.int64)
    for one in range(chunk):
        counts += np.bincount(_sets(bounds, seed, one * CHUNK, (one + 1) * CHUNK), minlength=len(counts))
    return counts


@lru_cache(maxsize=16)  # steps follow each other within an epoch; shuffling a million rows again for each is slow
def _epoch_order(num_rows: int, seed: int, epoch: int, number: int) -> Int64Array:
    key = [seed, RandomPurpose.DATA, epoch] + ([number] if number else [])
    return np.random.default_rng(key).permutation(num_rows)
