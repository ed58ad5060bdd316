"""Figures of how far trainer and generator disagree."""

import math
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.run.train_step.mismatch_monitor import mismatch_metrics
from rlcore.spi import GENERATION_LOGPROBS, TokenBatch


@st.composite
def minibatches(draw: st.DrawFn) -> tuple[TokenBatch, Any]:
    lengths = draw(st.lists(st.integers(2, 6), min_size=1, max_size=24))
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    random = np.random.default_rng(draw(st.integers(0, 999)))
    mask = random.random(offsets[-1]) < 0.5
    mask[offsets[:-1]] = False
    mask[-1] = True
    generation, trainer = (
        np.where(mask, -scale * random.exponential(size=offsets[-1]), 0.0).astype(np.float32) for scale in (1.0, 3.0)
    )
    batch = TokenBatch(
        tokens=random.integers(1, 32, offsets[-1], dtype=np.int32),
        offsets=offsets,
        loss_mask=mask,
        token_columns={GENERATION_LOGPROBS: generation},
    )
    return batch, trainer


@given(minibatches(), st.data())
def test_the_figures_of_chosen_sequences_are_those_of_their_definitions(
    made: tuple[TokenBatch, Any], data: st.DataObject
) -> None:
    batch, trainer = made
    chosen = sorted({batch.num_sequences - 1, *data.draw(st.sets(st.integers(0, batch.num_sequences - 1)))})
    pairs = [
        (float(trainer[token]), float(batch.token_columns[GENERATION_LOGPROBS][token]))
        for sequence in chosen
        for token in range(batch.offsets[sequence], batch.offsets[sequence + 1])
        if batch.loss_mask[token]
    ]
    ratios = [math.exp(mine - its) for mine, its in pairs]
    errors = [max(ratio, 1 / ratio) for ratio in ratios]
    divergences = [ratio - 1 - (mine - its) for ratio, (mine, its) in zip(ratios, pairs, strict=True)]
    assert mismatch_metrics(batch, np.array(chosen), trainer) == pytest.approx(
        {
            "token_mult_prob_error": fmean(errors),
            "generation_kl_error": fmean(divergences),
            "importance_ratio": fmean(ratios),
            "async/tokens_compared": len(pairs),
        },
        rel=1e-9,
        abs=1e-12,
    )
