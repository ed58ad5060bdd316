"""Updates, against torch's AdamW."""

import mlx.core as mx
import numpy as np
import pytest
import torch

from rlcore.spi import OptimizerSpec
from rlcore_mlx.optimizer import AdamW, global_norm


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.5, 1e6])
def test_updates_are_those_of_torch(max_grad_norm):
    spec = OptimizerSpec(betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1, max_grad_norm=max_grad_norm)
    random = np.random.default_rng(0)
    weights = {"matrix": random.standard_normal((5, 3)), "vector": random.standard_normal(5)}
    weights = {name: weight.astype(np.float32) for name, weight in weights.items()}
    leaves = {name: torch.tensor(weight, requires_grad=True) for name, weight in weights.items()}
    groups = [{"params": [leaves["matrix"]], "weight_decay": 0.1}, {"params": [leaves["vector"]], "weight_decay": 0.0}]
    expected = torch.optim.AdamW(groups, betas=spec.betas, eps=spec.eps)
    held = {name: mx.array(weight) for name, weight in weights.items()}
    optimizer = AdamW(spec, held)
    for count, rate in enumerate((0.1, 0.03, 0.01), start=1):
        gradients = {name: random.standard_normal(weight.shape).astype(np.float32) for name, weight in weights.items()}
        for name, leaf in leaves.items():
            leaf.grad = torch.tensor(gradients[name])
        total = torch.nn.utils.get_total_norm([leaf.grad for leaf in leaves.values()])
        if max_grad_norm:
            torch.nn.utils.clip_grads_with_norm_(leaves.values(), max_grad_norm, total)
        for group in expected.param_groups:
            group["lr"] = rate
        expected.step()
        found = {name: mx.array(gradient) for name, gradient in gradients.items()}
        assert global_norm(found) == pytest.approx(float(total), rel=1e-6)
        held = optimizer.update(held, found, global_norm(found), rate, count)
        for name, leaf in leaves.items():
            np.testing.assert_allclose(np.array(held[name]), leaf.detach().numpy(), rtol=1e-5, atol=1e-7)
