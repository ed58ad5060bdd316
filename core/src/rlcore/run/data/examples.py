"""Answers of a data set to learn from, as batches: demonstrations, chats, and pairs of a chosen and a rejected answer."""

from collections.abc import Sequence
from itertools import chain

import numpy as np
from attrs import frozen

from rlcore import spi
from rlcore.spi.arrays import AnyArray, BoolArray, Float32Array, Int64Array, gather_ragged, offsets_of


@frozen(kw_only=True, eq=False)
class Examples:
    """Examples to learn, of P rows: S sequences, of which each ends with the token that ends an answer."""

    tokens: spi.RaggedTokens
    """S sequences, those of a row one after another."""
    learned: BoolArray
    """bool [T]: the answers and their ends; the rest is what they answer."""
    row_offsets: Int64Array
    """int64 [P+1]: row p has the sequences row_offsets[p] to row_offsets[p+1] - 1."""
    rows: Int64Array
    """int64 [P]: the row of the data set that each came from, ascending."""
    num_dropped: int
    """Rows left out since they are over a limit."""
    rewards: Float32Array | None = None
    """float32 [S]: RolloutBatch.rewards of each sequence; None where all are 0."""
    images: spi.Images | None = None
    """The images of each of the S sequences; None where there are none."""
    margins: Float32Array | None = None
    """float32 [P]: by how much a row's chosen answer is better; None where rows do not say."""

    @classmethod
    def behind_prompts(
        cls,
        tokens: spi.RaggedTokens,
        prompt_lengths: Int64Array,
        *,
        answers: int,
        rows: Int64Array,
        num_dropped: int,
        images: spi.Images | None = None,
    ) -> "Examples":
        """So many answers of each row, each behind its prompt in a sequence of its own; of two, the chosen one first.
        `prompt_lengths` is int64 [S], each at least 1."""
        first_of_answer = tokens.offsets[:-1] + prompt_lengths
        return cls(
            tokens=tokens,
            learned=np.arange(len(tokens.tokens)) >= np.repeat(first_of_answer, tokens.lengths),
            row_offsets=np.arange(len(rows) + 1) * answers,
            rows=rows,
            num_dropped=num_dropped,
            rewards=np.tile(np.asarray([1.0, 0.0], np.float32), len(rows)) if answers > 1 else None,
            images=images,
        )


def joined_examples(parts: Sequence[Examples], first_rows: Sequence[int]) -> Examples:
    """The examples of several data sets as those of one, whose rows stand one set after another: `first_rows` are the numbers
    of each set's first row."""
    lengths = np.concatenate([part.tokens.lengths for part in parts])
    counts = np.concatenate([np.diff(part.row_offsets) for part in parts])
    return Examples(
        tokens=spi.RaggedTokens(tokens=np.concatenate([part.tokens.tokens for part in parts]), offsets=offsets_of(lengths)),
        learned=np.concatenate([part.learned for part in parts]),
        row_offsets=offsets_of(counts),
        rows=np.concatenate([part.rows + first for part, first in zip(parts, first_rows, strict=True)]),
        num_dropped=sum(part.num_dropped for part in parts),
        rewards=None if parts[0].rewards is None else np.concatenate([part.rewards for part in parts]),
        images=_joined_images(parts),
        margins=_joined_margins(parts),
    )


def _joined_images(parts: Sequence[Examples]) -> spi.Images | None:
    if all(part.images is None for part in parts):
        return None
    return tuple(chain.from_iterable(part.images or ((),) * part.tokens.num_sequences for part in parts))


def _joined_margins(parts: Sequence[Examples]) -> Float32Array | None:
    """float32 [P] of all parts, or None; 0.0 of a part that has none beside others."""
    if all(part.margins is None for part in parts):
        return None
    zeros = [np.zeros(len(part.rows), np.float32) for part in parts]
    return np.concatenate([zero if part.margins is None else part.margins for part, zero in zip(parts, zeros, strict=True)])


def example_batch(examples: Examples, indices: Int64Array) -> spi.RolloutBatch:
    """The examples of the rows `indices` int64 [M] among P, each row a group; loss_mask is True on what is learned."""
    sequences, group_offsets = gather_ragged(examples.row_offsets, indices)
    gather, offsets = gather_ragged(examples.tokens.offsets, sequences)
    counts = np.diff(group_offsets)
    columns: dict[str, AnyArray] = {spi.GROUP_IDS: np.repeat(np.arange(len(indices), dtype=np.int32), counts)}
    if examples.margins is not None:
        columns[spi.MARGINS] = np.repeat(examples.margins[indices], counts)
    batch = spi.TokenBatch(
        tokens=examples.tokens.tokens[gather],
        offsets=offsets,
        loss_mask=examples.learned[gather],
        sequence_columns=columns,
        images=None if examples.images is None else tuple(examples.images[index] for index in sequences.tolist()),
    )
    return spi.RolloutBatch(
        batch=batch,
        rewards=np.zeros(len(sequences), np.float32) if examples.rewards is None else examples.rewards[sequences],
        valid=np.ones(len(sequences), np.bool_),
        finish_reasons=np.full(len(sequences), spi.FinishReason.STOP, np.uint8),
    )
