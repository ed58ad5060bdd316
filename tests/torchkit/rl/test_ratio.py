"""Ratios of tokens and of whole sequences, and what their gradients reach."""

import numpy as np
import pytest
import torch

from rlcore_torchkit.rl.policy_gradient import log_ratio, ratio_of
from rlcore_torchkit.rl.sequences import Sequences

SEQUENCES = Sequences(torch.tensor([False, True, True, False, True]), torch.tensor([0, 3, 5]))
DELTA = np.array([0.0, 0.3, -0.1, 0.0, 0.5])
PREVIOUS = np.array([0.0, -1.0, -2.0, 0.0, -0.7])
UPSTREAM = np.array([0.0, 1.0, 2.0, 0.0, 3.0])


@pytest.mark.parametrize(
    ("level", "value", "gradient"),
    [
        ("token", DELTA, UPSTREAM),
        ("sequence", [0.1, 0.1, 0.1, 0.5, 0.5], [0.0, 1.5, 1.5, 0.0, 3.0]),
        ("sequence_token", [0.1, 0.1, 0.1, 0.5, 0.5], UPSTREAM),
        ("sequence_product", [0.2, 0.2, 0.2, 0.5, 0.5], [0.0, 3.0, 3.0, 0.0, 3.0]),
    ],
)
def test_a_tokens_log_ratio_is_its_own_or_that_of_its_sequence(level, value, gradient):
    current = torch.tensor(PREVIOUS + DELTA, requires_grad=True)
    found = log_ratio(level, current, torch.tensor(PREVIOUS), SEQUENCES)
    (found * torch.tensor(UPSTREAM)).sum().backward()
    np.testing.assert_allclose(found.detach(), value, atol=1e-12)
    np.testing.assert_allclose(current.grad, gradient, atol=1e-12)


def test_a_ratio_is_finite_and_without_a_gradient_far_away():
    leaf = torch.tensor([500.0, -500.0, 0.1], requires_grad=True)
    ratio_of(leaf).sum().backward()
    assert ratio_of(leaf).isfinite().all()
    assert leaf.grad.tolist() == [0.0, 0.0, pytest.approx(np.exp(0.1))]
