"""DPO as the loop sees it: what it needs, and the batch that it makes."""

import importlib

import numpy as np
import pytest
import torch

from rlcore.run.data.examples import Examples, example_batch
from rlcore.spi import REFERENCE_LOGPROBS, AlgorithmContext, AlgorithmNeeds, LossInputs, RaggedTokens
from rlcore_dpo.algorithm import Dpo
from rlcore_dpo.config import DpoConfig
from rlcore_dpo.loss import dpo_loss
from rlcore_dpo.provider import PROVIDER

CONTEXT = AlgorithmContext(
    seed=0, samples_per_prompt=1, minibatches_per_step=1, temperature=1.0, generation_logprobs_exact=True
)


@pytest.mark.parametrize("reference", ["initial", "none"])
def test_it_needs_whole_pairs_and_a_reference_where_it_compares_with_one(reference):
    needs = Dpo(CONTEXT, DpoConfig(reference=reference)).needs
    assert needs == AlgorithmNeeds(source="preferences", whole_groups=True, reference_logprobs=reference == "initial")


def test_pairs_are_the_training_batch():
    tokens = RaggedTokens(tokens=np.arange(8, dtype=np.int32), offsets=np.array([0, 2, 4, 6, 8], np.int64))
    examples = Examples.behind_prompts(tokens, np.ones(4, np.int64), answers=2, rows=np.arange(2), num_dropped=0)
    rollouts = example_batch(examples, np.array([1, 0]))
    config = DpoConfig(beta=0.3)
    training = Dpo(CONTEXT, config).build_batch(rollouts)
    assert training.batch is rollouts.batch
    assert training.no_signal is None
    assert training.loss.config is config
    module, function = training.loss.path.split(":")
    assert getattr(importlib.import_module(module), function) is dpo_loss


def test_the_provider_names_what_exists():
    for path, expected in ((PROVIDER.backend, "Dpo"), (PROVIDER.check, "check")):
        module, name = path.split(":")
        assert getattr(importlib.import_module(module), name).__name__ == expected
    assert PROVIDER.config is DpoConfig


@pytest.mark.parametrize("options", [{}, {"length_normalised": True}, {"reference": "none", "beta": 2.0}])
def test_held_out_pairs_are_measured_as_the_loss_does(options):
    random = np.random.default_rng(0)
    offsets = np.concatenate([[0], np.cumsum(random.integers(2, 7, 12))])
    tokens = RaggedTokens(tokens=np.zeros(offsets[-1], np.int32), offsets=offsets)
    examples = Examples.behind_prompts(tokens, np.ones(12, np.int64), answers=2, rows=np.arange(6), num_dropped=0)
    samples, config = example_batch(examples, np.arange(6)), DpoConfig(**options)
    logprobs, reference = (-random.exponential(1.0, offsets[-1]).astype(np.float32) for _ in range(2))
    measured = Dpo(CONTEXT, config).measure(samples, logprobs, reference if config.reference == "initial" else None)
    inputs = LossInputs(
        logprobs=torch.tensor(logprobs, dtype=torch.float64),
        entropy=None,
        loss_mask=torch.tensor(samples.batch.loss_mask),
        offsets=torch.tensor(samples.batch.offsets),
        token_columns={REFERENCE_LOGPROBS: torch.tensor(reference, dtype=torch.float64)},
        sequence_columns={},
        counts=samples.batch.counts(),
    )
    expected = dpo_loss(inputs, config).sums
    assert measured == {name: pytest.approx(float(expected[name]), rel=1e-5) for name in measured}
    assert set(measured) == {"rewards/margins", "rewards/accuracies"}
