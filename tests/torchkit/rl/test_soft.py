"""SAPO's gate and VESPO's kernel against their formulas in float64 numpy, and their gradients."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore_torchkit.rl.policy_gradient import MIN_LOG_WEIGHT, gated_objective, kernel_objective
from rlcore_torchkit.rl.sequences import Sequences

seeds = st.integers(0, 10**6)


def draw(seed, size=24):
    """Log-probabilities, log-ratios and advantages of four sequences, all tokens of which count."""
    random = np.random.default_rng(seed)
    sequences = Sequences(torch.ones(size, dtype=torch.bool), torch.arange(0, size + 1, size // 4))
    return -random.exponential(1.0, size), random.normal(0, 0.4, size), random.normal(0, 1, size), sequences


def gated(log_ratio, advantages, positive=1.0, negative=1.05):
    """arXiv:2511.20347: -A f(ρ), f(ρ) = σ(τ (ρ - 1)) 4/τ."""
    tau = np.where(advantages > 0, positive, negative)
    return -advantages * 4 / tau / (1 + np.exp(-tau * (np.exp(log_ratio) - 1)))


@settings(max_examples=25)
@given(seed=seeds)
def test_the_gate_is_that_of_the_formula_and_so_is_its_gradient(seed):
    _, log_ratio, advantages, _ = draw(seed)
    leaf = torch.tensor(log_ratio, requires_grad=True)
    found = gated_objective(leaf, torch.tensor(advantages), positive=2.0, negative=3.0)
    found.loss.sum().backward()
    np.testing.assert_allclose(found.loss.detach(), gated(log_ratio, advantages, 2.0, 3.0), rtol=1e-12)
    step = 1e-6
    up, down = (gated(log_ratio + sign * step, advantages, 2.0, 3.0) for sign in (1, -1))
    np.testing.assert_allclose(leaf.grad, (up - down) / (2 * step), rtol=1e-6, atol=1e-8)
    # The share of the gradient that is left, of that without a gate: -A ρ.
    kept = leaf.grad.numpy() / (-advantages * np.exp(log_ratio))
    np.testing.assert_allclose(found.figures["gate_mean"], kept, rtol=1e-9)


def test_an_unchanged_policy_is_not_weighed_down():
    advantages = torch.tensor([1.5, -0.5, 0.0], dtype=torch.float64)
    sequences = Sequences(torch.ones(3, dtype=torch.bool), torch.tensor([0, 2, 3]))
    for make in (
        lambda leaf: gated_objective(leaf, advantages, positive=1.0, negative=1.05),
        lambda leaf: kernel_objective(
            leaf, leaf.detach(), advantages, None, sequences, positive=(2.0, 3.0), negative=(3.0, 2.0)
        ),
    ):
        leaf = torch.zeros(3, dtype=torch.float64, requires_grad=True)
        make(leaf).loss.sum().backward()
        torch.testing.assert_close(leaf.grad, -advantages)


@pytest.mark.parametrize("weighed", [False, True])
@settings(max_examples=25)
@given(seed=seeds)
def test_the_kernel_is_that_of_the_formula_and_constant(weighed, seed):
    """arXiv:2602.10693: φ(w) = w^k e^(λ (1 - w)), w the product over the sequence."""
    current, log_ratio, advantages, sequences = draw(seed)
    importance = np.random.default_rng(seed).uniform(0.5, 1.5, len(current)) if weighed else np.ones(len(current))
    leaf = torch.tensor(current, requires_grad=True)
    found = kernel_objective(
        leaf,
        torch.tensor(log_ratio),
        torch.tensor(advantages),
        torch.tensor(importance) if weighed else None,
        sequences,
        positive=(2.0, 3.0),
        negative=(3.0, 1.5),
    )
    found.loss.sum().backward()
    w = np.repeat((np.exp(log_ratio) * importance).reshape(4, -1).prod(1), len(current) // 4)
    kernel = np.where(advantages >= 0, w**2 * np.exp(3 * (1 - w)), w**3 * np.exp(1.5 * (1 - w)))
    np.testing.assert_allclose(found.figures["kernel_mean"], kernel, rtol=1e-9)
    np.testing.assert_allclose(found.loss.detach(), -kernel * advantages * current, rtol=1e-9)
    np.testing.assert_allclose(leaf.grad, -kernel * advantages, rtol=1e-9)


@pytest.mark.parametrize("nats", [500.0, -500.0])
def test_what_is_far_away_is_finite(nats):
    advantages, current = torch.tensor([1.0, -1.0]), torch.tensor([-1.0, -1.0], requires_grad=True)
    sequences = Sequences(torch.ones(2, dtype=torch.bool), torch.tensor([0, 1, 2]))
    log_ratio = current - (current.detach() - nats)
    for objective in (
        gated_objective(log_ratio, advantages, positive=1.0, negative=1.05),
        kernel_objective(current, log_ratio, advantages, None, sequences, positive=(2.0, 3.0), negative=(3.0, 2.0)),
    ):
        (gradient,) = torch.autograd.grad(objective.loss.sum(), current, retain_graph=True)
        assert objective.loss.isfinite().all()
        assert gradient.abs().max() < 1e-6


def test_the_least_factor_is_1e_minus_8():
    assert math.log(1e-8) == MIN_LOG_WEIGHT
