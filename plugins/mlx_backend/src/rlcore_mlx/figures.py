"""Log-probabilities and entropies of packed tokens, without the logits of all of them.

Shapes: T tokens, M of them not the first of a sequence, D hidden size, V vocabulary.
"""

from functools import partial

import mlx.core as mx
import numpy as np
from attrs import frozen

from rlcore.spi import TokenBatch
from rlcore_mlx.decoder import Decoder, Weights, attention_scale
from rlcore_mlx.packing import PackedSequences


@frozen(kw_only=True, eq=False)
class TokenFigures:
    """The forward pass of a microbatch."""

    decoder: Decoder
    temperature: float
    max_chunk_logits: int

    def of(self, weights: Weights, batch: TokenBatch) -> tuple[mx.array, mx.array]:
        """float32 [T] each: log-probabilities, and entropies in nats; 0.0 at first tokens."""
        packed, tokens = PackedSequences.of(batch.offsets), mx.array(batch.tokens)
        scale = attention_scale(self.decoder.dims)
        hidden = self.decoder.hidden(weights, tokens, packed.positions, lambda _, *heads: packed.attend(*heads, scale))
        later = np.delete(np.arange(batch.num_tokens), batch.offsets[:-1])
        if not len(later):
            return mx.zeros(batch.num_tokens), mx.zeros(batch.num_tokens)
        rows, head, targets = hidden[mx.array(later - 1)], self.decoder.head(weights), tokens[mx.array(later)]
        # What a chunk's gradient needs is computed again, so that no other chunk's logits are kept.
        chunk = mx.checkpoint(partial(_row_figures, self.temperature))
        size = max(1, self.max_chunk_logits // self.decoder.dims.vocab_size)
        starts = range(0, len(later), size)
        parts = [chunk(rows[start : start + size], head, targets[start : start + size]) for start in starts]
        logprobs, entropies = (mx.concatenate(each) for each in zip(*parts, strict=True))
        empty, places = mx.zeros(batch.num_tokens), mx.array(later)
        return empty.at[places].add(logprobs), empty.at[places].add(entropies)


def _row_figures(temperature: float, rows: mx.array, head: mx.array, targets: mx.array) -> tuple[mx.array, mx.array]:
    """[rows] each, of hidden states [rows, D], the head [V, D] and the tokens [rows] that came."""
    logits = (rows @ head.T).astype(mx.float32) / temperature
    total = mx.logsumexp(logits, axis=-1)
    logprobs = mx.take_along_axis(logits, mx.stop_gradient(targets)[:, None], axis=-1)[:, 0] - total
    return logprobs, total - (mx.exp(logits - total[:, None]) * logits).sum(-1)
