"""Importance weights, checked by summing over a whole vocabulary."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore_torchkit.rl.correction import importance_ratio, truncate

seeds = st.integers(0, 10**6)


def two_distributions(seed, size=7):
    """Logits of a policy (a leaf) and of a reference, float64, close enough that no clamp binds."""
    random = np.random.default_rng(seed)
    return torch.tensor(random.uniform(-0.5, 0.5, size), requires_grad=True), torch.tensor(random.uniform(-0.5, 0.5, size))


@settings(max_examples=25)
@given(seed=seeds)
def test_importance_ratio_moves_an_expectation_from_generator_to_trainer(seed):
    trainer, generator = (logits.detach().log_softmax(0) for logits in two_distributions(seed))
    values = torch.arange(7.0, dtype=torch.float64)
    weighted = (generator.exp() * importance_ratio(trainer, generator) * values).sum()
    torch.testing.assert_close(weighted, (trainer.exp() * values).sum())


def test_importance_ratio_is_zero_where_it_is_not_finite_and_has_no_gradient():
    previous = torch.tensor([0.0, -1.0, float("nan"), -np.inf, -1.0], requires_grad=True)
    found = importance_ratio(previous, torch.tensor([-200.0, -np.inf, -1.0, -1.0, -1.5]))
    assert not found.requires_grad
    np.testing.assert_allclose(found.numpy(), [0.0, 0.0, 0.0, 0.0, np.exp(0.5)], rtol=1e-6)


@settings(max_examples=25)
@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.1, 100))
def test_truncation_changes_only_what_is_above_the_maximum(ratios, maximum):
    """min(ratio, C): Ionides, "Truncated Importance Sampling", 2008."""
    found = truncate(torch.tensor(ratios, dtype=torch.float64), maximum=maximum)
    np.testing.assert_array_equal(found.numpy(), np.minimum(ratios, maximum))
