"""The objectives with hard bounds against float64 numpy references, and their gradients against finite differences."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore_torchkit.rl.policy_gradient import (
    clipped_objective,
    clipped_weight_objective,
    drop_tokens,
    geometric_mean_objective,
    penalised_objective,
)
from rlcore_torchkit.rl.sequences import Sequences

CLIPS = [(0.2, 0.2, None), (0.2, 0.28, None), (0.1, 0.4, 3.0), (0.2, 0.2, 1.5)]


def reference(current, previous, advantages, clip_low, clip_high, dual_clip):
    """PPO-clip (arXiv:1707.06347, equation 7) as a loss, DAPO's bounds (arXiv:2503.14476, equation 10), dual clip
    (arXiv:1912.09729, equation 5), token by token."""
    result = []
    for now, before, advantage in zip(current, previous, advantages, strict=True):
        ratio = np.exp(now - before)
        gain = min(ratio * advantage, min(max(ratio, 1 - clip_low), 1 + clip_high) * advantage)
        if dual_clip is not None and advantage < 0:
            gain = max(gain, dual_clip * advantage)
        result.append(-gain)
    return np.array(result)


def draw(seed, size=64):
    random = np.random.default_rng(seed)
    previous = -random.exponential(2.0, size)
    return previous + random.normal(0, 0.7, size), previous, random.normal(0, 2.0, size) * random.integers(0, 2, size)


def call(current, previous, advantages, clip):
    low, high, dual = clip
    return clipped_objective(current - previous, advantages, clip_low=low, clip_high=high, dual_clip=dual)


@pytest.mark.parametrize("clip", CLIPS)
@settings(max_examples=25)
@given(seed=st.integers(0, 10**6))
def test_value_matches_the_reference(clip, seed):
    arrays = draw(seed)
    found = call(*map(torch.tensor, arrays), clip)
    np.testing.assert_allclose(found.loss.numpy(), reference(*arrays, *clip), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(found.ratio.numpy(), np.exp(arrays[0] - arrays[1]), rtol=1e-12)


@pytest.mark.parametrize("clip", CLIPS)
def test_gradient_matches_finite_differences_and_is_zero_exactly_where_a_clip_binds(clip):
    current, previous, advantages = draw(seed=7, size=400)
    leaf = torch.tensor(current, requires_grad=True)
    found = call(leaf, torch.tensor(previous), torch.tensor(advantages), clip)
    found.loss.sum().backward()
    step = 1e-6
    up, down = (reference(current + sign * step, previous, advantages, *clip) for sign in (1, -1))
    np.testing.assert_allclose(leaf.grad.numpy(), (up - down) / (2 * step), rtol=1e-6, atol=1e-7)
    bound = found.figures["clip_fraction"] | found.figures["dual_clip_fraction"]
    assert torch.equal(leaf.grad == 0, bound | torch.tensor(advantages == 0))
    assert found.figures["clip_fraction_low"].any()
    assert found.figures["clip_fraction_high"].any()
    assert found.figures["dual_clip_fraction"].any() == (clip[2] is not None)


def test_unchanged_policy_gives_minus_advantage_as_value_and_gradient():
    current = torch.tensor([-0.5, -2.0, -1.0], requires_grad=True)
    advantages = torch.tensor([1.5, -0.5, 0.0])
    found = call(current, current.detach(), advantages, (0.2, 0.2, None))
    found.loss.sum().backward()
    assert torch.equal(found.loss, -advantages)
    assert torch.equal(current.grad, -advantages)
    assert not found.figures["clip_fraction"].any()


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("difference", [500.0, -500.0])
def test_extreme_ratios_stay_finite(sign, difference):
    current = torch.tensor([-1.0], requires_grad=True)
    found = call(current, current.detach() - difference, torch.tensor([sign]), (0.2, 0.2, None))
    found.loss.sum().backward()
    assert torch.isfinite(found.loss).all()
    assert torch.equal(current.grad, torch.zeros(1))


def test_dual_clip_bounds_the_loss_of_negative_advantages_only():
    random = np.random.default_rng(3)
    advantages = torch.tensor(random.normal(size=500))
    found = call(torch.tensor(random.normal(0, 3, 500)), torch.zeros(500), advantages, (0.2, 0.2, 3.0))
    assert (found.loss <= 3.0 * advantages.abs() + 1e-12).all()
    assert not found.figures["dual_clip_fraction"][advantages >= 0].any()


def test_a_clipped_weight_leaves_every_token_a_gradient():
    """arXiv:2506.13585: -A stopgrad(clip(ρ)) log π; with clip_low = 1 there is no lower bound."""
    current, previous, advantages = draw(seed=7, size=100)
    ratio = np.exp(current - previous)
    for clip_low, lower in ((1.0, 0.0), (0.2, 0.8)):
        leaf = torch.tensor(current, requires_grad=True)
        found = clipped_weight_objective(
            leaf, leaf - torch.tensor(previous), torch.tensor(advantages), clip_low=clip_low, clip_high=0.3
        )
        found.loss.sum().backward()
        weight = np.clip(ratio, lower, 1.3)
        np.testing.assert_allclose(found.loss.detach(), -advantages * weight * current, rtol=1e-12)
        np.testing.assert_allclose(leaf.grad, -advantages * weight, rtol=1e-12)
        np.testing.assert_array_equal(found.figures["clip_fraction_high"], ratio > 1.3)
        np.testing.assert_array_equal(found.figures["clip_fraction_low"], ratio < lower)


def geometric(log_ratio, advantage, low, high):
    """arXiv:2507.20673, one sequence: (Π min(ρ |A|, clip(ρ) |A|))^(1/T) for A > 0, with max for A < 0, times A's sign."""
    ratio = np.exp(log_ratio)
    pick = np.minimum if advantage > 0 else np.maximum
    return -np.sign(advantage) * np.prod(pick(ratio, np.clip(ratio, low, high)) * abs(advantage)) ** (1 / len(ratio))


@settings(max_examples=25)
@given(seed=st.integers(0, 10**6))
def test_the_geometric_mean_is_one_of_clipped_ratios(seed):
    random = np.random.default_rng(seed)
    log_ratio, advantages = random.normal(0, 0.5, 12), np.repeat([1.3, -0.4, 2.0], [5, 3, 4])
    cuts = [0, 5, 8, 12]
    sequences = Sequences(torch.ones(12, dtype=torch.bool), torch.tensor(cuts))
    leaf = torch.tensor(log_ratio, requires_grad=True)
    found = geometric_mean_objective(leaf, torch.tensor(advantages), sequences, clip_low=0.33, clip_high=0.49)
    found.loss.sum().backward()
    step, expected, gradient = 1e-6, [], np.zeros(12)
    for first, last in itertools.pairwise(cuts):
        piece, length = log_ratio[first:last], last - first
        expected += [geometric(piece, advantages[first], 0.67, 1.49)] * length
        for t in range(length):
            up, down = (geometric(piece + sign * step * np.eye(length)[t], advantages[first], 0.67, 1.49) for sign in (1, -1))
            gradient[first + t] = length * (up - down) / (2 * step)
    np.testing.assert_allclose(found.loss.detach(), expected, rtol=1e-10)
    np.testing.assert_allclose(leaf.grad, gradient, rtol=1e-5, atol=1e-7)
    assert torch.equal(leaf.grad == 0, found.figures["clip_fraction"])


def test_chosen_tokens_are_left_out_or_held_back():
    """arXiv:2505.22617: Clip-Cov gives them no gradient, KL-Cov that of -A ρ + β |log ρ|."""
    current, previous, advantages = draw(seed=3)
    chosen = torch.arange(len(current)) % 5 == 0
    leaf = torch.tensor(current, requires_grad=True)
    clipped = call(leaf, torch.tensor(previous), torch.tensor(advantages), (0.2, 0.2, None))
    (plain,) = torch.autograd.grad(clipped.loss.sum(), leaf, retain_graph=True)
    (found,) = torch.autograd.grad(drop_tokens(clipped, chosen).loss.sum(), leaf)
    assert torch.equal(found, torch.where(chosen, 0.0, plain))
    log_ratio = torch.tensor(current - previous, requires_grad=True)
    penalised = penalised_objective(log_ratio, torch.tensor(advantages), chosen, coefficient=0.7)
    penalised.loss.sum().backward()
    ratio, inside = np.exp(current - previous), chosen.numpy()
    expected = -advantages * ratio + 0.7 * np.abs(current - previous) * inside
    np.testing.assert_allclose(penalised.loss.detach(), expected, rtol=1e-12)
    expected = -advantages * ratio + 0.7 * np.sign(current - previous) * inside
    np.testing.assert_allclose(log_ratio.grad, expected, rtol=1e-12)
