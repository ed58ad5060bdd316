"""Attention of prompts, which are kept for the cache, and of new tokens to what the cache holds.

Shapes: P prompts, L tokens, A attention heads, K key-value heads, G = A / K, D head size, E that of values, B places in use,
R rows.
"""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from rlcore_torchkit.layers.packed_attention import PLAIN, Scores, padded_attention
from rlcore_transformers.cache import SlotCache


class Attend(Protocol):
    """Attention of a layer's new tokens, which continue sequences by equally many each; and what else these keep."""

    num_rows: int
    """Sequences."""
    states: list[Tensor]
    """[num_rows, ...] what layers hand from token to token, in the order in which `layer_states` lists it."""

    def sequences(self, tokens: Tensor) -> Tensor:
        """int64 [num_rows, length]: the tokens of each sequence up to the new ones, int64 [R], and anything behind them. Keeps
        the new ones for later."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scores: Scores = PLAIN) -> Tensor:
        """From query [R, A, D], key [R, K, D] and value [R, K, E] to [R, A * E]; keeps key and value for later tokens."""


class PromptAttention:
    """Causal attention over P prompts, padded on the right to L tokens: what comes after a token does not reach it."""

    def __init__(self, num_prompts: int, length: int) -> None:
        self.num_rows = num_prompts
        self.length = length
        self.states: list[Tensor] = []
        self.keys: list[Tensor] = []
        """[P, K, L, D] by layer; values [P, K, L, E] alike."""
        self.values: list[Tensor] = []

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scores: Scores = PLAIN) -> Tensor:
        del layer
        query, key, value = (rows.unflatten(0, (self.num_rows, self.length)).transpose(1, 2) for rows in (query, key, value))
        self.keys.append(key)
        self.values.append(value)
        mixed = padded_attention(query, key, value, scores)
        return mixed.transpose(1, 2).reshape(self.num_rows * self.length, -1)

    def sequences(self, tokens: Tensor) -> Tensor:
        rows = tokens.view(self.num_rows, self.length)
        self.keys = [rows[:, None, :, None]]
        return rows


class SlotAttention:
    """Attention of one new token in each of the first B places to all that its place holds.

    float32 takes two batched products, several times faster on CPU than the fused kernel, for the heads of a group share a key
    and so form a matrix; lower precision takes the fused kernel, which keeps the weights in float32, but for scores that no
    kernel of torch knows.
    """

    def __init__(self, cache: SlotCache, positions: Tensor, length: int) -> None:
        """`positions` int64 [B]: each place's column for the new token; `length`: the largest, plus one."""
        self._cache = cache
        self._positions = positions
        self._length = length
        self.num_rows = len(positions)
        self.states = [states[: self.num_rows] for states in cache.states]
        self._rows = torch.arange(self.num_rows, device=positions.device)
        self._visible: dict[int | None, Tensor] = {}
        self._biases: dict[tuple[int | None, int], Tensor] = {}

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scores: Scores = PLAIN) -> Tensor:
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        keys[self._rows, :, self._positions] = key
        values[self._rows, :, self._positions] = value
        num_rows, num_kv_heads = key.shape[:2]
        grouped = query.reshape(num_rows, num_kv_heads, -1, query.shape[-1])
        keys, values = keys[:num_rows, :, : self._length], values[:num_rows, :, : self._length]
        if keys.dtype == torch.float32 or scores.is_stored:
            mixed = self._products(grouped, keys, values, scores)
        else:
            mask = self._seen(scores.window)[:, None, None]
            mixed = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scores.scaling)
        return mixed.reshape(num_rows, -1)

    def sequences(self, tokens: Tensor) -> Tensor:
        (rows,) = self._cache.keys
        rows[self._rows, 0, self._positions, 0] = tokens
        return rows[: self.num_rows, 0, : self._length, 0]

    def _products(self, query: Tensor, keys: Tensor, values: Tensor, scores: Scores) -> Tensor:
        """[B * K, G, E] of query [B, K, G, D], keys [B, K, length, D] and values [B, K, length, E], computed in float32."""
        num_kv_heads = keys.shape[1]
        flat_query, flat_keys = query.flatten(0, 1).float(), keys.flatten(0, 1).float()
        scaling = query.shape[-1] ** -0.5 if scores.scaling is None else scores.scaling
        bias = self._bias(scores.window, num_kv_heads)
        if scores.softcap:
            weights = bias + scores.softcap * torch.tanh(flat_query @ flat_keys.transpose(1, 2) * (scaling / scores.softcap))
        else:
            weights = torch.baddbmm(bias, flat_query, flat_keys.transpose(1, 2), alpha=scaling)
        if scores.sinks is not None:
            sinks = scores.sinks.float().view(num_kv_heads, -1).repeat(len(query), 1)
            weights = torch.cat([weights, sinks[..., None]], -1).softmax(-1)[..., :-1]
        else:
            weights = weights.softmax(-1)
        return torch.bmm(weights.to(values.dtype), values.flatten(0, 1))

    def _seen(self, window: int | None) -> Tensor:
        """bool [B, length]: the columns that each new token sees."""
        if window not in self._visible:
            columns = torch.arange(self._length, device=self._positions.device)
            seen = columns <= self._positions[:, None]
            self._visible[window] = seen if window is None else seen & (columns > self._positions[:, None] - window)
        return self._visible[window]

    def _bias(self, window: int | None, num_kv_heads: int) -> Tensor:
        """float32 [B * K, 1, length]: 0 or -inf."""
        key = window, num_kv_heads
        if key not in self._biases:
            seen = self._seen(window)
            hidden = torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, float("-inf"))
            self._biases[key] = hidden.repeat_interleave(num_kv_heads, 0)[:, None]
        return self._biases[key]
