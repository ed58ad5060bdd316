"""Token batches to check trainers with, and the ways in which one optimizer step can be cut into microbatches."""

from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

import numpy as np
from attrs import evolve

from rlcore.spi import ADVANTAGES, GlobalCounts, TokenBatch
from rlcore.spi.arrays import AnyArray, Int64Array
from rlcore_conformance.references.probe import PROBE_WEIGHT

LENGTHS = (1, 2, 9, 5, 13, 7)
"""Tokens of the sequences; the first has no log-probability at all."""
LONG_LENGTHS = (3, 270, 61)
"""Longer than tables and caches that a backend may have sized too small: 32, 48, 64, 128, 256."""
MAX_SEQUENCE_LENGTH = 288

Arrangement: TypeAlias = Literal["together", "apart", "reversed", "uneven"]
ARRANGEMENTS: tuple[Arrangement, ...] = get_args(Arrangement)


def make_batch(vocab_size: int, seed: int, lengths: Sequence[int] = LENGTHS) -> TokenBatch:
    """Random tokens, a random loss mask, and the columns that the probe loss reads."""
    random = np.random.default_rng(seed)
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    num_tokens = int(offsets[-1])
    loss_mask = random.random(num_tokens) < 0.6
    loss_mask[offsets[:-1]] = False
    loss_mask[offsets[1:] - 1] &= np.asarray(lengths) < 9  # the longer ones end in tokens without a loss
    loss_mask[offsets[-1] - 3] = True
    return TokenBatch(
        tokens=random.integers(0, vocab_size, num_tokens, dtype=np.int32),
        offsets=offsets,
        loss_mask=loss_mask,
        token_columns={ADVANTAGES: random.standard_normal(num_tokens).astype(np.float32)},
        sequence_columns={PROBE_WEIGHT: random.random(len(lengths)).astype(np.float32)},
    )


def with_logprobs(batch: TokenBatch, *names: str) -> TokenBatch:
    """Return the batch with columns of random log-probabilities, other ones in each."""
    random = np.random.default_rng(9)
    for name in names:
        column = np.where(batch.loss_mask, -random.exponential(3.0, batch.num_tokens), 0.0).astype(np.float32)
        batch = batch.with_token_column(name, column)
    return batch


def spoiled(batch: TokenBatch) -> TokenBatch:
    """Return a batch whose last loss token makes the probe loss NaN."""
    column = batch.token_columns[ADVANTAGES].copy()
    column[np.flatnonzero(batch.loss_mask)[-1]] = np.nan
    return batch.with_token_column(ADVANTAGES, column)


def without_loss(batch: TokenBatch) -> TokenBatch:
    """Return the batch with an all-False loss mask."""
    return evolve(batch, loss_mask=np.zeros(batch.num_tokens, np.bool_))


def counts_of(batches: Sequence[TokenBatch]) -> GlobalCounts:
    """Return the global counts of all microbatches together."""
    found = [batch.counts() for batch in batches]
    return GlobalCounts(
        num_loss_tokens=sum(part.num_loss_tokens for part in found),
        num_loss_sequences=sum(part.num_loss_sequences for part in found),
    )


def scaled_counts(batch: TokenBatch, factor: int) -> GlobalCounts:
    """Return the batch's own counts, multiplied by `factor`."""
    own = batch.counts()
    return GlobalCounts(num_loss_tokens=factor * own.num_loss_tokens, num_loss_sequences=factor * own.num_loss_sequences)


def arrange(batch: TokenBatch, arrangement: Arrangement) -> tuple[TokenBatch, ...]:
    """The sequences of a batch in one microbatch, each in its own, in reversed order in three, or in three of unequal size, of
    which the first and last hold one."""
    return tuple(batch.select(indices) for indices in arranged_indices(batch, arrangement))


def arranged_indices(batch: TokenBatch, arrangement: Arrangement) -> list[Int64Array]:
    """Return the sequences that each microbatch of an arrangement holds."""
    indices = np.arange(batch.num_sequences, dtype=np.int64)
    return {
        "together": [indices],
        "apart": np.split(indices, batch.num_sequences),
        "reversed": np.array_split(indices[::-1], 3),
        "uneven": [indices[4:5], np.delete(indices, [2, 4]), indices[2:3]],
    }[arrangement]


def arranged(column: AnyArray, batch: TokenBatch, arrangement: Arrangement) -> list[AnyArray]:
    """A column of a batch, [T, ...], cut as an arrangement cuts the batch."""
    sequences = np.split(column, batch.offsets[1:-1])
    return [np.concatenate([sequences[index] for index in indices]) for indices in arranged_indices(batch, arrangement)]
