"""DPO as the loop sees it: what it needs, and the batch that it makes."""

import importlib

import numpy as np
import pytest

from rlcore.run.data.examples import Examples, example_batch
from rlcore.spi import AlgorithmContext, AlgorithmNeeds, RaggedTokens
from rlcore_dpo.algorithm import Dpo
from rlcore_dpo.config import DpoConfig
from rlcore_dpo.loss import dpo_loss
from rlcore_dpo.provider import PROVIDER

CONTEXT = AlgorithmContext(seed=0, samples_per_prompt=1, updates_per_step=1, temperature=1.0, generation_logprobs_exact=True)


@pytest.mark.parametrize("reference", ["initial", "none"])
def test_it_needs_whole_pairs_and_a_reference_where_it_compares_with_one(reference):
    needs = Dpo(CONTEXT, DpoConfig(reference=reference)).needs
    assert needs == AlgorithmNeeds(source="preferences", whole_groups=True, reference_logprobs=reference == "initial")


def test_pairs_are_the_training_batch():
    tokens = RaggedTokens(tokens=np.arange(8, dtype=np.int32), offsets=np.array([0, 2, 4, 6, 8], np.int64))
    examples = Examples(tokens=tokens, prompt_lengths=np.ones(4, np.int64), answers=2, rows=np.arange(2), num_dropped=0)
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
