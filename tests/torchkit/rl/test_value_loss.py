"""The critic's loss against plain Python, and its gradient against finite differences."""

import math

import numpy as np
import pytest
import torch

from rlcore_torchkit.rl.value_loss import clipped_value_loss

CLIPS = [0.2, 1.0, math.inf]


def reference(value, previous, target, clip):
    """0.5 max((V - R)², (clip(V, V_old - c, V_old + c) - R)²): arXiv:1707.06347 with the clipping of arXiv:2005.12729."""
    bounded = min(max(value, previous - clip), previous + clip)
    return 0.5 * max((value - target) ** 2, (bounded - target) ** 2), (bounded - target) ** 2 > (value - target) ** 2


def draw(size=300):
    random = np.random.default_rng(3)
    previous = random.normal(0, 1, size)
    return previous + random.normal(0, 0.7, size), previous, previous + random.normal(0, 1, size)


@pytest.mark.parametrize("clip", CLIPS)
def test_loss_and_clipped_tokens_are_those_of_the_formula(clip):
    arrays = draw()
    found = clipped_value_loss(*map(torch.tensor, arrays), clip=clip)
    losses, clipped = zip(*(reference(*each, clip) for each in zip(*arrays, strict=True)), strict=True)
    np.testing.assert_allclose(found.loss.numpy(), losses, rtol=1e-12)
    assert found.clipped.tolist() == list(clipped)
    assert any(clipped) == (clip < math.inf)


@pytest.mark.parametrize("clip", CLIPS)
def test_gradient_is_that_of_finite_differences_and_0_where_a_value_is_held_back(clip):
    values, previous, targets = draw()
    leaf = torch.tensor(values, requires_grad=True)
    clipped_value_loss(leaf, torch.tensor(previous), torch.tensor(targets), clip=clip).loss.sum().backward()
    step = 1e-6
    numeric = [
        (reference(v + step, p, t, clip)[0] - reference(v - step, p, t, clip)[0]) / (2 * step)
        for v, p, t in zip(values, previous, targets, strict=True)
    ]
    np.testing.assert_allclose(leaf.grad, numeric, rtol=1e-6, atol=1e-8)
    held_back = clipped_value_loss(*map(torch.tensor, draw()), clip=clip).clipped
    assert not leaf.grad[held_back].any()
