"""Distillation as the loop sees it."""

import importlib

import numpy as np
import pytest

from rlcore.spi import (
    GENERATION_LOGPROBS,
    GROUP_IDS,
    REFERENCE_LOGPROBS,
    AlgorithmContext,
    RolloutBatch,
    TokenBatch,
)
from rlcore_distill.algorithm import LOSSES, Distill
from rlcore_distill.config import DistillConfig
from rlcore_distill.provider import PROVIDER

CONTEXT = AlgorithmContext(
    seed=0, samples_per_prompt=1, minibatches_per_step=1, temperature=1.0, generation_logprobs_exact=True
)


@pytest.mark.parametrize(
    ("samples", "source", "columns"),
    [
        ("student", "rollouts", (REFERENCE_LOGPROBS, GENERATION_LOGPROBS)),
        ("teacher", "demonstrations", (REFERENCE_LOGPROBS,)),
    ],
)
def test_texts_come_from_whom_the_recipe_says(samples, source, columns):
    distill = Distill(CONTEXT, DistillConfig(samples=samples))
    assert distill.needs.source == source
    assert distill.needs.reference_logprobs
    assert distill.needs.reference_model
    batch = TokenBatch(
        tokens=np.arange(3, dtype=np.int32),
        offsets=np.array([0, 3], np.int64),
        loss_mask=np.array([False, True, True]),
        sequence_columns={GROUP_IDS: np.zeros(1, np.int32)},
    )
    rollouts = RolloutBatch(
        batch=batch, rewards=np.zeros(1, np.float32), valid=np.ones(1, bool), finish_reasons=np.zeros(1, np.uint8)
    )
    training = distill.build_batch(rollouts)
    assert training.batch is batch
    assert training.no_signal is None, "equal rewards are no lack of a signal here"
    assert training.loss.token_columns == columns
    mine, theirs = np.array([0, -3, -1], np.float32), np.array([0, -1, -2], np.float32)
    assert distill.measure(rollouts, mine, theirs) == {"forward_kl": pytest.approx(0.5)}


def test_what_is_named_exists():
    for path in (PROVIDER.backend, *(path for path, _ in LOSSES.values())):
        module, name = path.split(":")
        assert hasattr(importlib.import_module(module), name)
