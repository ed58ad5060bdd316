"""The samples that trainer and generator disagree most about."""

from typing import Any

import numpy as np
from hypothesis import given

from rlcore.spi import GENERATION_LOGPROBS, TokenBatch
from rlcore_report.worst_samples import MAX_SAMPLES, WorstSamples

from ..core.run.train_step.test_mismatch import minibatches  # type: ignore[import-not-found]


@given(minibatches())
def test_the_worst_samples_are_those_that_add_most_a_token(made: tuple[TokenBatch, Any]) -> None:
    batch, trainer = made
    naive = []
    for index in range(batch.num_sequences):
        part = slice(batch.offsets[index], batch.offsets[index + 1])
        mask = batch.loss_mask[part]
        difference = trainer[part].astype(np.float64) - batch.token_columns[GENERATION_LOGPROBS][part]
        if mask.any():
            naive.append(np.exp(np.abs(difference[mask])).mean())
    worst = WorstSamples.of(batch, trainer, 7)
    np.testing.assert_allclose(worst.errors, sorted(naive, reverse=True)[:MAX_SAMPLES], rtol=1e-5)
    assert worst.batch.num_sequences == min(len(naive), MAX_SAMPLES)
    for index, position in enumerate(worst.worst_positions.tolist()):
        part = worst.differences[worst.batch.offsets[index] : worst.batch.offsets[index + 1]]
        assert abs(part[position]) == np.abs(part).max()
