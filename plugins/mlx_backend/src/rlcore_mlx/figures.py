"""Log-probabilities and entropies of packed tokens, without the logits of all of them.

Shapes: T tokens, D hidden size, V vocabulary.
"""

from functools import partial

import mlx.core as mx
import numpy as np

from rlcore.spi import TokenBatch
from rlcore_mlx.decoder import Decoder, Weights
from rlcore_mlx.packing import PackedSequences


def token_figures(
    decoder: Decoder, weights: Weights, batch: TokenBatch, temperature: float, max_chunk_logits: int
) -> tuple[mx.array, mx.array]:
    """float32 [T] each: log-probabilities, and entropies in nats; 0.0 at first tokens."""
    packed, tokens, empty = PackedSequences.of(batch.offsets), mx.array(batch.tokens), mx.zeros(batch.num_tokens)
    later = np.delete(np.arange(batch.num_tokens), batch.offsets[:-1])
    if not len(later):
        return empty, empty
    hidden = decoder.hidden(weights, tokens, packed.positions, packed.attend)
    rows, head, targets = hidden[mx.array(later - 1)], decoder.head(weights), tokens[mx.array(later)]
    # What a chunk's gradient needs is computed again, so that no other chunk's logits are kept.
    chunk = mx.checkpoint(partial(_row_figures, temperature))
    size = max(1, max_chunk_logits // decoder.dims.vocab_size)
    starts = range(0, len(later), size)
    parts = [chunk(rows[start : start + size], head, targets[start : start + size]) for start in starts]
    logprobs, entropies = (mx.concatenate(each) for each in zip(*parts, strict=True))
    return empty.at[mx.array(later)].add(logprobs), empty.at[mx.array(later)].add(entropies)


def _row_figures(temperature: float, rows: mx.array, head: mx.array, targets: mx.array) -> tuple[mx.array, mx.array]:
    """[rows] each, of hidden states [rows, D], the head [V, D] and the tokens [rows] that came."""
    logits = (rows @ head.T).astype(mx.float32) / temperature
    total = mx.logsumexp(logits, axis=-1)
    logprobs = mx.take_along_axis(logits, mx.stop_gradient(targets)[:, None], axis=-1)[:, 0] - total
    return logprobs, total - (mx.exp(logits - total[:, None]) * logits).sum(-1)
