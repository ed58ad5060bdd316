"""KL estimators, checked by summing over a whole vocabulary."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore_torchkit.rl.policy_gradient import kl_penalty

ESTIMATORS = ("k1", "k2", "k3")
seeds = st.integers(0, 10**6)


def reference(current, ref, estimator):
    """Schulman, "Approximating KL Divergence" (2020), with r = reference / current for a sample of current."""
    log_r = np.clip(ref - current, -20, 20)
    value = {"k1": -log_r, "k2": log_r**2 / 2, "k3": np.exp(log_r) - 1 - log_r}[estimator]
    return np.clip(value, -10, 10)


def two_distributions(seed, size=7):
    """Logits of a policy (a leaf) and of a reference, float64, close enough that no clamp binds."""
    random = np.random.default_rng(seed)
    return torch.tensor(random.uniform(-0.5, 0.5, size), requires_grad=True), torch.tensor(random.uniform(-0.5, 0.5, size))


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("gradient", ["expectation", "estimate"])
@settings(max_examples=25)
@given(seed=seeds)
def test_value_matches_the_reference_and_is_clamped(estimator, gradient, seed):
    random = np.random.default_rng(seed)
    current, ref = -random.exponential(3, 50), -random.exponential(3, 50)
    current[:2], ref[:2] = (-100.0, -0.1), (-0.1, -100.0)
    found = kl_penalty(torch.tensor(current), torch.tensor(ref), estimator=estimator, gradient=gradient).numpy()
    np.testing.assert_allclose(found, reference(current, ref, estimator), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_gradient_of_each_token_matches_finite_differences(estimator):
    """DeepSeekMath (arXiv:2402.03300, equation 4) differentiates the estimate; "expectation" adds estimate times score."""
    random = np.random.default_rng(1)
    current, ref = -random.exponential(1, 60), -random.exponential(1, 60)
    step = 1e-6
    up, down = (reference(current + sign * step, ref, estimator) for sign in (1, -1))
    estimate = (up - down) / (2 * step)
    for gradient, expected in (("estimate", estimate), ("expectation", estimate + reference(current, ref, estimator))):
        leaf = torch.tensor(current, requires_grad=True)
        kl_penalty(leaf, torch.tensor(ref), estimator=estimator, gradient=gradient).sum().backward()
        np.testing.assert_allclose(leaf.grad.numpy(), expected, rtol=1e-6, atol=1e-7)


def exact_kl(policy_logits, reference_logits):
    policy = policy_logits.log_softmax(0)
    return (policy.exp() * (policy - reference_logits.log_softmax(0))).sum()


def sampled(policy_logits, reference_logits, estimator, gradient):
    """The estimator's mean over all tokens, weighed by their (constant) probability as sampling weighs them."""
    policy = policy_logits.log_softmax(0)
    kl = kl_penalty(policy, reference_logits.log_softmax(0), estimator=estimator, gradient=gradient)
    return (policy.exp().detach() * kl).sum()


@pytest.mark.parametrize("estimator", ["k1", "k3"])
@settings(max_examples=25)
@given(seed=seeds)
def test_expectation_and_its_gradient_are_those_of_the_divergence(estimator, seed):
    policy, ref = two_distributions(seed)
    exact = exact_kl(policy, ref)
    (expected,) = torch.autograd.grad(exact, policy)
    estimate = sampled(policy, ref, estimator, "expectation")
    (found,) = torch.autograd.grad(estimate, policy)
    torch.testing.assert_close(estimate, exact)
    torch.testing.assert_close(found, expected)


@settings(max_examples=25)
@given(seed=seeds)
def test_differentiating_k2_alone_gives_the_gradient_of_the_divergence_and_k1_none(seed):
    policy, ref = two_distributions(seed)
    (expected,) = torch.autograd.grad(exact_kl(policy, ref), policy)
    (k2,) = torch.autograd.grad(sampled(policy, ref, "k2", "estimate"), policy)
    (k1,) = torch.autograd.grad(sampled(policy, ref, "k1", "estimate"), policy)
    torch.testing.assert_close(k2, expected)
    torch.testing.assert_close(k1, torch.zeros_like(k1))


@settings(max_examples=25)
@given(seed=seeds)
def test_tokens_of_another_policy_give_the_divergence_of_this_one(seed):
    """Weighed by the ratio of the two (arXiv:2512.02556), value and gradient are those of KL(policy, reference)."""
    policy, ref = two_distributions(seed)
    sampler = two_distributions(seed + 1)[1].log_softmax(0)
    exact = exact_kl(policy, ref)
    (expected,) = torch.autograd.grad(exact, policy)
    kl = kl_penalty(
        policy.log_softmax(0),
        ref.log_softmax(0),
        estimator="k3",
        gradient="expectation",
        log_weight=policy.log_softmax(0) - sampler,
    )
    estimate = (sampler.exp() * kl).sum()
    (found,) = torch.autograd.grad(estimate, policy)
    torch.testing.assert_close(estimate, exact)
    torch.testing.assert_close(found, expected)


def test_a_weight_is_a_constant_where_the_estimate_alone_is_differentiated():
    current = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    reference, sampler = torch.tensor([-1.5, -1.0]), torch.tensor([-0.5, -2.5])
    kl_penalty(current, reference, estimator="k2", gradient="estimate", log_weight=current - sampler).sum().backward()
    np.testing.assert_allclose(current.grad, [np.exp(-0.5) * 0.5, np.exp(0.5) * -1.0], rtol=1e-12)
