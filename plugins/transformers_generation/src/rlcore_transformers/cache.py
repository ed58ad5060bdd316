"""The KV cache: places for sequences of different lengths, and the attention that reads and writes them.

Shapes: P prompts, L tokens, A attention heads, K key-value heads, G = A / K, D head size, B places in use, R rows.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import StaticCache

LENGTH_STEP = 64
"""Cache lengths are rounded up to a multiple, so that similar requests share one allocation."""


class PromptAttention:
    """Causal attention over P prompts, padded on the right to L tokens: what comes after a token does not reach it."""

    def __init__(self, num_prompts: int, length: int) -> None:
        self._num_prompts = num_prompts
        self.length = length
        self.keys: list[Tensor] = []
        """[P, K, L, D] by layer; values alike."""
        self.values: list[Tensor] = []

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        del layer
        query, key, value = (
            rows.unflatten(0, (self._num_prompts, self.length)).transpose(1, 2) for rows in (query, key, value)
        )
        self.keys.append(key)
        self.values.append(value)
        grouped = query.shape[1] != key.shape[1]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
        return mixed.transpose(1, 2).reshape(self._num_prompts * self.length, -1)


class SlotCache:
    """transformers' static cache, used as places: the sequence in place b fills columns [0, its length)."""

    def __init__(
        self, config: Any, num_slots: int, length: int, shape: tuple[int, int], dtype: torch.dtype, device: Any
    ) -> None:
        self.num_slots = num_slots
        self.length = -(-length // LENGTH_STEP) * LENGTH_STEP
        self._cache = StaticCache(config=config, max_cache_len=self.length)
        num_kv_heads, head_size = shape
        self._cache.early_initialization(num_slots, num_kv_heads, head_size, dtype, device)
        self.keys: list[Tensor] = [layer.keys for layer in self._cache.layers]
        """[slots, K, length, D] by layer, finite everywhere; values alike."""
        self.values: list[Tensor] = [layer.values for layer in self._cache.layers]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))

    def fill(self, first: int, prompts: PromptAttention, rows: Tensor) -> None:
        """Copy the prompts numbered `rows` int64 [B] into the places from `first` on."""
        last, length = first + len(rows), prompts.length
        for pool, source in ((self.keys, prompts.keys), (self.values, prompts.values)):
            for slots, prompt in zip(pool, source, strict=True):
                slots[first:last, :, :length] = prompt[rows]

    def take(self, other: "SlotCache", num_slots: int, length: int) -> None:
        """Copy the first `length` columns of the first places of a smaller cache."""
        for mine, theirs in zip((*self.keys, *self.values), (*other.keys, *other.values), strict=True):
            mine[:num_slots, :, :length] = theirs[:num_slots, :, :length]

    def move(self, sources: Tensor, targets: Tensor, length: int) -> None:
        """Copy the first `length` columns of the places `sources` int64 [B] to the places `targets`, none of them a source."""
        for slots in (*self.keys, *self.values):
            slots[targets, :, :length] = slots[sources, :, :length]


class SlotAttention:
    """Attention of one new token in each of the first B places to all that its place holds.

    float32 takes two batched products, several times faster on CPU than the fused kernel, for the heads of a group share a key
    and so form a matrix; lower precision takes the fused kernel, which keeps the weights in float32.
    """

    def __init__(self, cache: SlotCache, positions: Tensor, length: int) -> None:
        """`positions` int64 [B]: each place's column for the new token; `length`: the largest, plus one."""
        self._cache = cache
        self._positions = positions
        self._length = length
        self._rows = torch.arange(len(positions), device=positions.device)
        self._in_products = cache.keys[0].dtype == torch.float32
        visible = torch.arange(length, device=positions.device) <= positions[:, None]
        self._mask = self._bias(visible) if self._in_products else visible[:, None, None]
        """float32 [B * K, 1, length], 0 or -inf, for the products; bool [B, 1, 1, length] for the fused kernel."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        keys[self._rows, :, self._positions] = key
        values[self._rows, :, self._positions] = value
        num_rows, num_kv_heads = key.shape[:2]
        grouped = query.reshape(num_rows, num_kv_heads, -1, query.shape[-1])
        keys, values = keys[:num_rows, :, : self._length], values[:num_rows, :, : self._length]
        if self._in_products:
            mixed = self._products(grouped.flatten(0, 1), keys.flatten(0, 1), values.flatten(0, 1))
        else:
            mixed = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=self._mask)
        return mixed.reshape(num_rows, -1)

    def _products(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """query [B * K, G, D], keys and values [B * K, length, D] -> [B * K, G, D]."""
        scores = torch.baddbmm(self._mask, query, keys.transpose(1, 2), alpha=query.shape[-1] ** -0.5)
        return torch.bmm(scores.softmax(-1), values)

    def _bias(self, visible: Tensor) -> Tensor:
        hidden = torch.zeros(visible.shape, device=visible.device).masked_fill_(~visible, float("-inf"))
        return hidden.repeat_interleave(self._cache.keys[0].shape[1], 0)[:, None]
