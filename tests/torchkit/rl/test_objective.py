"""The plain policy gradient, in expectation over a whole vocabulary."""

import torch

from rlcore_torchkit.rl.policy_gradient import policy_gradient


def test_its_gradient_is_that_of_the_expected_advantage():
    logits = torch.tensor([0.3, -1.0, 0.5, 0.1], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    current = logits.log_softmax(0)
    (expected,) = torch.autograd.grad(-(current.exp() * advantages).sum(), logits, retain_graph=True)
    objective = policy_gradient(current, advantages, log_ratio=current - current.detach())
    (found,) = torch.autograd.grad((current.exp().detach() * objective.loss).sum(), logits)
    torch.testing.assert_close(found, expected)
    assert objective.ratio.tolist() == [1.0] * 4
