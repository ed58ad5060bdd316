"""Attention over packed sequences: those of similar length side by side, padded at their right end.

Under causal attention no token sees what stands behind it, so padding needs no mask.
"""

from collections.abc import Iterator

import mlx.core as mx
import numpy as np
from attrs import frozen

from rlcore.spi.arrays import Int64Array

MAX_GROUP_SCORES = 2**22
"""Products of a query and a key of one head in a group, unless one sequence alone has more."""


@frozen(kw_only=True, eq=False)
class PackedSequences:
    """Places of the tokens of packed sequences."""

    positions: mx.array
    """int32 [T]: of each token in its sequence."""
    groups: tuple[mx.array, ...]
    """int32 [sequences, longest] each: the numbers of their tokens, the last one again behind a shorter sequence's end."""
    places: mx.array
    """int32 [T]: where each token comes in all groups one after another."""

    @classmethod
    def of(cls, offsets: Int64Array) -> "PackedSequences":
        """`offsets` are int64 [N+1]."""
        lengths = np.diff(offsets)
        positions = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
        groups, places, start = [], np.zeros(offsets[-1], np.int32), 0
        for members in _similar(lengths):
            steps = np.arange(lengths[members].max())
            rows = offsets[members][:, None] + np.minimum(steps, lengths[members][:, None] - 1)
            real = steps < lengths[members][:, None]
            places[rows[real]] = start + np.flatnonzero(real)
            start += rows.size
            groups.append(mx.array(rows.astype(np.int32)))
        return cls(positions=mx.array(positions.astype(np.int32)), groups=tuple(groups), places=mx.array(places))

    def attend(self, _number: int, queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
        """[T, H, E] of queries [T, H, E], keys and values [T, K, E]; causal, within each sequence."""
        found, scale = [], queries.shape[-1] ** -0.5
        for rows in self.groups:
            parts = (each[rows].swapaxes(1, 2) for each in (queries, keys, values))
            attended = mx.fast.scaled_dot_product_attention(*parts, scale=scale, mask="causal")
            found.append(attended.swapaxes(1, 2).reshape(-1, *queries.shape[1:]))
        return mx.concatenate(found)[self.places]


def _similar(lengths: Int64Array) -> Iterator[Int64Array]:
    """The sequences in groups, each of which is more than half as long as the group's longest."""
    ordered = np.argsort(-lengths, kind="stable")
    first = 0
    for index in range(1, len(ordered) + 1):
        longest = lengths[ordered[first]] if len(ordered) else 0
        full = (index - first + 1) * longest**2 > MAX_GROUP_SCORES
        if index == len(ordered) or full or 2 * lengths[ordered[index]] <= longest:
            yield ordered[first:index]
            first = index
