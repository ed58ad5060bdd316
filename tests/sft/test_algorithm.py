"""Supervised fine-tuning as the loop sees it: what it needs, and the batch that it makes."""

import importlib

import numpy as np
import pytest
from attrs import evolve

from rlcore.spi import GROUP_IDS, AlgorithmContext, AlgorithmNeeds, RolloutBatch, TokenBatch
from rlcore_sft.algorithm import Sft
from rlcore_sft.config import SftConfig
from rlcore_sft.loss import sft_loss
from rlcore_sft.provider import PROVIDER


@pytest.fixture
def rollouts():
    """Two demonstrations."""
    batch = TokenBatch(
        tokens=np.arange(5, dtype=np.int32),
        offsets=np.array([0, 2, 5], np.int64),
        loss_mask=np.array([False, True, False, True, True]),
        sequence_columns={GROUP_IDS: np.arange(2, dtype=np.int32)},
    )
    return RolloutBatch(
        batch=batch, rewards=np.zeros(2, np.float32), valid=np.ones(2, bool), finish_reasons=np.zeros(2, np.uint8)
    )


@pytest.fixture
def sft():
    context = AlgorithmContext(
        seed=0, samples_per_prompt=1, minibatches_per_step=1, temperature=1.0, generation_logprobs_exact=True
    )
    return Sft(context, SftConfig())


def test_demonstrations_are_the_training_batch(sft, rollouts):
    assert sft.needs == AlgorithmNeeds(source="demonstrations")
    training = sft.build_batch(rollouts)
    assert training.batch is rollouts.batch
    assert training.no_signal is None
    assert training.loss.token_columns == ()
    assert training.loss.entropy == "none"
    module, function = training.loss.path.split(":")
    assert getattr(importlib.import_module(module), function) is sft_loss


def test_empty_completions_are_no_signal(sft, rollouts):
    empty = evolve(rollouts, batch=evolve(rollouts.batch, loss_mask=np.zeros(5, bool)))
    assert sft.build_batch(empty).no_signal == "no completion has a token to train on"


def test_the_provider_names_what_exists():
    module, name = PROVIDER.backend.split(":")
    assert getattr(importlib.import_module(module), name) is Sft
    assert PROVIDER.config is SftConfig
