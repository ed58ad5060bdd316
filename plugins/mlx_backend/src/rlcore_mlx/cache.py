"""The keys and values of samples that are decoded together.

Shapes: B rows, H heads, K heads of keys and values, L tokens of the longest prompt, E numbers of a head, S slots.
"""

import mlx.core as mx
import numpy as np

from rlcore.spi.arrays import Int32Array, Int64Array
from rlcore_mlx.decoder import Decoder, Weights

BLOCK = 64
"""Slots that the cache grows by."""


class Cache:
    """Prompts padded at their right end, then one slot for each token that all rows generate at the same time."""

    def __init__(self, decoder: Decoder, weights: Weights) -> None:
        self.decoder, self.weights, self.scale = decoder, weights, decoder.dims.head_dim**-0.5
        self.layers: list[tuple[mx.array, mx.array]] = []
        """Keys and values [B, K, S, E] of each layer."""

    def begin(self, prompts: list[Int32Array], rows: Int64Array) -> mx.array:
        """Read each prompt once, make row b of prompt rows[b], and return the logits [B, V] after them."""
        lengths = np.array([len(prompt) for prompt in prompts])
        padded = np.zeros((len(prompts), lengths.max()), np.int32)
        for row, prompt in zip(padded, prompts, strict=True):
            row[: len(prompt)] = prompt
        positions = mx.broadcast_to(mx.arange(padded.shape[1]), padded.shape)
        hidden = self.decoder.hidden(self.weights, mx.array(padded), positions, self.attend_prompts)
        last = hidden[mx.arange(len(prompts)), mx.array(lengths - 1)]
        logits = last @ self.decoder.head(self.weights).T
        self.seen, self.lengths = np.arange(padded.shape[1]) < lengths[:, None], lengths
        self.num_generated = 0
        return self.keep(rows, logits)

    def keep(self, rows: Int64Array, logits: mx.array) -> mx.array:
        """Go on with these rows, of which one may come several times, and return theirs of `logits`."""
        chosen = mx.array(rows)
        self.layers = [(keys[chosen], values[chosen]) for keys, values in self.layers]
        self.seen, self.lengths = self.seen[rows], self.lengths[rows]
        logits = logits[chosen]
        mx.eval(self.layers, logits)
        return logits

    def step(self, tokens: Int32Array) -> mx.array:
        """Read one token [B] of each row, and return the logits [B, V] after it."""
        slot = self.seen.shape[1]
        self.seen = np.pad(self.seen, ((0, 0), (0, 1)), constant_values=True)
        mask = mx.array(self.seen)[:, None, None]
        positions = mx.array(self.lengths + self.num_generated)[:, None]
        self.num_generated += 1

        def attend(number: int, queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
            held = self.layers[number] = self.with_token(number, slot, keys, values)
            found = mx.fast.scaled_dot_product_attention(
                queries.swapaxes(1, 2), *(each[:, :, : slot + 1] for each in held), scale=self.scale, mask=mask
            )
            return found.swapaxes(1, 2)

        hidden = self.decoder.hidden(self.weights, mx.array(tokens)[:, None], positions, attend)
        return hidden[:, 0] @ self.decoder.head(self.weights).T

    def attend_prompts(self, number: int, queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:  # noqa: ARG002
        """Under causal attention no token sees the padding behind it."""
        keys, values = keys.swapaxes(1, 2), values.swapaxes(1, 2)
        self.layers.append((keys, values))
        found = mx.fast.scaled_dot_product_attention(queries.swapaxes(1, 2), keys, values, scale=self.scale, mask="causal")
        return found.swapaxes(1, 2)

    def with_token(self, number: int, slot: int, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """A layer's keys and values with those of one token, [B, 1, K, E], in this slot."""
        held = []
        for cached, new in zip(self.layers[number], (keys, values), strict=True):
            if slot == cached.shape[2]:
                cached = mx.pad(cached, ((0, 0), (0, 0), (0, BLOCK), (0, 0)))
            cached[:, :, slot : slot + 1] = new.swapaxes(1, 2)
            held.append(cached)
        return held[0], held[1]
