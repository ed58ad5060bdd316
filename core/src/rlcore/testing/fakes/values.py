"""The fakes' model of values: the tables of the policy, and the product of the logits after each token with one more weight.

Shape suffixes: T tokens, V vocabulary.
"""

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from rlcore.spi.arrays import Int32Array, Int64Array
from rlcore.spi.weights import VALUE_HEAD_WEIGHT
from rlcore.testing.fakes.policy import (
    NAMES,
    NUM_POSITIONS,
    ORIGIN,
    POSITION,
    TRANSITION,
    Float64Array,
    Weights,
    logits,
    make_weights,
)

VALUES_PATH = "values"
"""The model path that stands for a directory which holds a head of values."""


def make_value_weights(vocab_size: int, seed: int, scale: float, path: str) -> dict[str, NDArray[np.float32]]:
    """The policy's tables and `score.weight` float32 [1, V]: random where the model's path is VALUES_PATH, and else zero."""
    row = np.random.default_rng([seed, 1]).standard_normal((1, vocab_size)) * (scale if path == VALUES_PATH else 0.0)
    return {**make_weights(vocab_size, seed, scale), VALUE_HEAD_WEIGHT: row.astype(np.float32)}


@frozen(kw_only=True, eq=False)
class ValueForward:
    """Values of a batch, with what their gradient needs."""

    first: Int64Array
    """int64 [T]: the first token of each token's sequence."""
    tokens: Int64Array
    """int64 [T]"""
    position: Int64Array
    """int64 [T]: of the token that would come next."""
    states: Float64Array
    """float64 [T, V]: the logits after each token."""
    score: Float64Array
    """float64 [V]"""

    @classmethod
    def of(cls, weights: Weights, tokens: Int32Array, offsets: Int64Array) -> "ValueForward":
        """Read every token of sequences `tokens` int32 [T], `offsets` int64 [N+1]."""
        starts = np.repeat(offsets[:-1], np.diff(offsets))
        first, read, position = tokens[starts].astype(np.int64), tokens.astype(np.int64), np.arange(len(tokens)) - starts + 1
        score = weights[VALUE_HEAD_WEIGHT].astype(np.float64)[0]
        states = logits(weights, first, read, position)
        return cls(first=first, tokens=read, position=position, states=states, score=score)

    def values(self) -> Float64Array:
        """float64 [T]"""
        return np.asarray(self.states @ self.score)

    def gradients(self, weights: Weights, value_grads: Float64Array) -> dict[str, Float64Array]:
        """float64 gradients of all weights, given those of the values, float64 [T]."""
        rows = {TRANSITION: self.tokens, ORIGIN: self.first, POSITION: self.position % NUM_POSITIONS}
        grads = {name: np.zeros(weights[name].shape) for name in NAMES}
        for name, indices in rows.items():
            np.add.at(grads[name], indices, value_grads[:, None] * self.score)
        return {**grads, VALUE_HEAD_WEIGHT: (value_grads @ self.states)[None]}
