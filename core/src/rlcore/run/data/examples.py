"""Answers of a data set to learn from, as batches: demonstrations, and pairs of a chosen and a rejected answer."""

import numpy as np
from attrs import frozen

from rlcore import spi
from rlcore.spi.arrays import Int64Array, gather_ragged


@frozen(kw_only=True, eq=False)
class Examples:
    """The answers of P rows behind their prompts, each one sequence that ends with the token that ends it."""

    tokens: spi.RaggedTokens
    """P · answers sequences, those of a row one after another."""
    prompt_lengths: Int64Array
    """int64 [P · answers]: tokens of the prompt, at least 1."""
    answers: int
    """Answers of a row: 1 of a demonstration; 2 of a preference, the chosen one first."""
    rows: Int64Array
    """int64 [P]: the row of the data set that each came from, ascending."""
    num_dropped: int
    """Rows left out since they are over a limit."""


def example_batch(examples: Examples, indices: Int64Array) -> spi.RolloutBatch:
    """The examples of the rows `indices` int64 [M] among P, each row a group; loss_mask is True on an answer and its end. The
    reward is 1.0 for a chosen answer, and 0.0 for any other."""
    sequences = (indices[:, None] * examples.answers + np.arange(examples.answers)).reshape(-1)
    gather, offsets = gather_ragged(examples.tokens.offsets, sequences)
    first_of_answer = examples.tokens.offsets[:-1][sequences] + examples.prompt_lengths[sequences]
    batch = spi.TokenBatch(
        tokens=examples.tokens.tokens[gather],
        offsets=offsets,
        loss_mask=gather >= np.repeat(first_of_answer, np.diff(offsets)),
        sequence_columns={spi.GROUP_IDS: np.repeat(np.arange(len(indices), dtype=np.int32), examples.answers)},
    )
    rewards = np.zeros((len(indices), examples.answers), np.float32)
    if examples.answers > 1:
        rewards[:, 0] = 1.0
    return spi.RolloutBatch(
        batch=batch,
        rewards=rewards.reshape(-1),
        valid=np.ones(len(sequences), np.bool_),
        finish_reasons=np.full(len(sequences), spi.FinishReason.STOP, np.uint8),
    )
