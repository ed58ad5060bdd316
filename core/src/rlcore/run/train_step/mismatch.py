"""Measures how far generator and trainer disagree on sampled tokens."""

import numpy as np

from rlcore.spi import GENERATION_LOGPROBS, MISMATCH_METRICS, TokenBatch
from rlcore.spi.arrays import Float32Array, Int64Array, take_rows

MAX_DIFFERENCE = 50.0


def mismatch_metrics(batch: TokenBatch, sequences: Int64Array, trainer_logprobs: Float32Array) -> dict[str, float]:
    """MISMATCH_METRICS over the loss tokens of some of a batch's sequences, of which the trainer found `trainer_logprobs`,
    float32 [T]; and how many tokens these are, as `async/tokens_compared`. The formulas are those of
    rlcore_torchkit.trainer.losses, with the same cap."""
    mask = take_rows(batch.loss_mask, batch.offsets, sequences)
    generation, trainer = (
        take_rows(column, batch.offsets, sequences)[mask].astype(np.float64)
        for column in (batch.token_columns[GENERATION_LOGPROBS], trainer_logprobs)
    )
    delta = np.clip(trainer - generation, -MAX_DIFFERENCE, MAX_DIFFERENCE)
    figures = np.exp(np.abs(delta)).mean(), (np.expm1(delta) - delta).mean(), np.exp(delta).mean()
    return {**dict(zip(MISMATCH_METRICS, map(float, figures), strict=True)), "async/tokens_compared": float(len(delta))}
