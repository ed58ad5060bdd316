"""Muon's update against torch.optim.Muon."""

import pytest
import torch

from rlcore.spi import MuonSpec
from rlcore_torchkit.optimizer.muon import momentum_update, orthogonalized, update_scale

SHAPES = [(24, 40), (40, 24), (32, 32), (1, 8)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("spec", [MuonSpec(), MuonSpec(momentum=0.8, nesterov=False, newton_schulz_steps=3, scale="original")])
def test_steps_are_those_of_torch(shape, spec):
    """To the bit: three steps of a matrix."""
    generator = torch.Generator().manual_seed(0)
    expected = torch.nn.Parameter(torch.randn(shape, generator=generator))
    found, momentum = expected.detach().clone(), torch.zeros(shape)
    optimizer = torch.optim.Muon(
        [expected],
        lr=0.01,
        weight_decay=0.1,
        momentum=spec.momentum,
        nesterov=spec.nesterov,
        ns_steps=spec.newton_schulz_steps,
        adjust_lr_fn=spec.scale,
    )
    for _ in range(3):
        expected.grad = torch.randn(shape, generator=generator)
        optimizer.step()
        update = orthogonalized(momentum_update(expected.grad, momentum, spec)[None], spec)[0]
        found.mul_(1 - 0.01 * 0.1).add_(update, alpha=-0.01 * update_scale(*shape, spec))
    assert torch.equal(found, expected.detach())


def test_matrices_of_a_stack_are_updated_each_by_itself():
    stack = torch.randn(3, 24, 16, generator=torch.Generator().manual_seed(1))
    alone = torch.stack([orthogonalized(matrix[None], MuonSpec())[0] for matrix in stack])
    assert torch.equal(orthogonalized(stack, MuonSpec()), alone)


def test_update_of_nothing_is_nothing():
    assert orthogonalized(torch.zeros(1, 4, 6), MuonSpec()).abs().max() == 0.0
