"""Drawing tokens so that a draw depends on its seed, its position and its logits alone.

Shapes: B rows, V vocabulary.
"""

import mlx.core as mx
import numpy as np

from rlcore.spi import SamplingParams
from rlcore.spi.arrays import Int64Array
from rlcore_torchkit.generation import splitmix64


def position_keys(seeds: Int64Array, positions: Int64Array) -> mx.array:
    """uint32 [B, 2]: the keys of MLX's generator for int64 [B] seeds and positions in their sequences."""
    mixed = splitmix64(splitmix64(seeds.astype(np.uint64)) + positions.astype(np.uint64))
    return mx.array(mixed.view(np.uint32).reshape(-1, 2))


def sample_tokens(logits: mx.array, keys: mx.array, sampling: SamplingParams) -> tuple[mx.array, mx.array]:
    """Tokens [B] and their log-probabilities float32 [B], from logits [B, V] and keys of `position_keys`.

    By Gumbel's maximum: logits that differ by rounding alone almost never change which token is drawn.
    """
    logits = logits.astype(mx.float32)
    if sampling.temperature == 0.0:
        table = log_softmax(logits)
        tokens = table.argmax(-1)
    else:
        table = truncate(log_softmax(logits / sampling.temperature), sampling.top_k, sampling.top_p)
        noise = mx.vmap(lambda key: mx.random.gumbel((logits.shape[-1],), key=key))(keys)
        tokens = (table + noise).argmax(-1)
    return tokens, mx.take_along_axis(table, tokens[:, None], axis=-1)[:, 0]


def truncate(table: mx.array, top_k: int, top_p: float) -> mx.array:
    """Log-probabilities [B, V] of the most probable tokens, renormalised, -inf elsewhere; top_k = 0 and top_p = 1 keep all.

    Tokens exactly as probable as the last one kept are kept too.
    """
    num_tokens = table.shape[-1]
    if 0 < top_k < num_tokens:
        least = mx.sort(table, axis=-1)[:, num_tokens - top_k, None]
        table = log_softmax(mx.where(table >= least, table, -mx.inf))
    if top_p < 1.0:
        ordered = -mx.sort(-table, axis=-1)
        before = mx.cumsum(mx.exp(ordered), axis=-1) - mx.exp(ordered)
        num_kept = mx.maximum((before < top_p).sum(-1, keepdims=True), 1)
        least = mx.take_along_axis(ordered, num_kept - 1, axis=-1)
        table = log_softmax(mx.where(table >= least, table, -mx.inf))
    return table


def log_softmax(logits: mx.array) -> mx.array:
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)
