"""Attention over packed sequences is that over each alone."""

import mlx.core as mx
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore_mlx.packing import PackedSequences


def alone(queries, keys, values):
    """Causal attention in float64, [L, H, E] of queries [L, H, E] and keys and values [L, K, E]."""
    keys, values = (np.repeat(each, queries.shape[1] // keys.shape[1], 1).astype(np.float64) for each in (keys, values))
    scores = np.einsum("ihe,jhe->hij", queries, keys) / np.sqrt(queries.shape[-1])
    scores[:, np.triu(np.ones(scores.shape[1:], bool), 1)] = -np.inf
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hij,jhe->ihe", shares / shares.sum(-1, keepdims=True), values)


@settings(deadline=None, max_examples=5, derandomize=True)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=7))
def test_each_sequence_sees_itself_alone(lengths):
    random, total = np.random.default_rng(0), sum(lengths)
    queries, keys, values = (random.standard_normal((total, heads, 8)).astype(np.float32) for heads in (4, 2, 2))
    offsets = np.cumsum([0, *lengths])
    packed = PackedSequences.of(offsets)
    found = np.array(packed.attend(0, *map(mx.array, (queries, keys, values))))
    parts = zip(*(np.split(each, offsets[1:-1]) for each in (queries, keys, values)), strict=True)
    np.testing.assert_allclose(found, np.concatenate([alone(*part) for part in parts]), atol=1e-5)
    assert np.array(packed.positions).tolist() == [position for length in lengths for position in range(length)]
    for rows in packed.groups:
        longest = rows.shape[1]
        members = {int(np.searchsorted(offsets, row, "right")) - 1 for row in np.array(rows)[:, 0]}
        assert all(2 * lengths[member] > longest for member in members), "more than half of a row is padding"
