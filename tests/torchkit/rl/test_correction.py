"""Importance weights, checked by summing over a whole vocabulary."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore_torchkit.rl.policy_gradient import (
    bound_importance_weight,
    importance_ratio,
    off_policy_mask,
    sequence_importance_ratio,
    within_geometric_mean,
)
from rlcore_torchkit.rl.sequences import Sequences

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
    found = bound_importance_weight(torch.tensor(ratios, dtype=torch.float64), "truncate", minimum=0.0, maximum=maximum)
    np.testing.assert_array_equal(found.numpy(), np.minimum(ratios, maximum))


@settings(max_examples=25)
@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.01, 0.9), st.floats(1.1, 100))
def test_bounds_truncate_or_leave_out(ratios, minimum, maximum):
    """TIS: the nearest bound; IcePop (arXiv:2510.18855): 0 outside [minimum, maximum]."""
    tensor = torch.tensor(ratios, dtype=torch.float64)
    truncated = bound_importance_weight(tensor, "truncate", minimum=minimum, maximum=maximum)
    np.testing.assert_array_equal(truncated.numpy(), np.clip(ratios, minimum, maximum))
    masked = bound_importance_weight(tensor, "mask", minimum=minimum, maximum=maximum)
    assert masked.tolist() == [ratio if minimum <= ratio <= maximum else 0.0 for ratio in ratios]


DELTA = torch.tensor([9.0, 0.4, -0.2, 9.0, -0.6, 0.5, -0.1])
SEQUENCES = Sequences(torch.tensor([False, True, True, False, True, True, True]), torch.tensor([0, 3, 5, 7]))


def test_a_sequences_ratio_is_the_product_over_its_loss_tokens():
    found = sequence_importance_ratio(DELTA, torch.zeros(7), SEQUENCES)
    np.testing.assert_allclose(found, np.exp([0.2, 0.2, 0.2, -0.6, -0.6, 0.4, 0.4]), rtol=1e-6)
    far = sequence_importance_ratio(DELTA * 1e4, torch.zeros(7, requires_grad=True), SEQUENCES)
    assert far.isfinite().all()
    assert not far.requires_grad


def test_sequences_are_told_apart_by_the_geometric_mean_of_their_ratios():
    """exp(0.1), exp(-0.6) and exp(0.2)."""
    found = within_geometric_mean(DELTA, torch.zeros(7), SEQUENCES, minimum=0.6, maximum=1.2)
    assert found.tolist() == [True] * 3 + [False] * 4


def test_tokens_of_negative_advantage_are_left_out_where_the_policy_has_gone_far():
    """DeepSeek-V3.2 (arXiv:2512.02556, equation 9): the mean of log μ/π of the three sequences is -0.1, 0.6 and -0.2."""
    advantages = torch.tensor([0.0, -1.0, -1.0, 0.0, -1.0, -1.0, 1.0])
    assert (
        off_policy_mask(DELTA, torch.zeros(7), advantages, SEQUENCES, maximum=0.5).tolist() == [True] * 4 + [False] + [True] * 2
    )
    assert off_policy_mask(DELTA, torch.zeros(7), advantages.abs(), SEQUENCES, maximum=0.5).all()
