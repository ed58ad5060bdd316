"""Transformers in float64, with formulas of float64 in the places where its code computes in float32."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
from fsdp2_support import Reference
from torch import Tensor, nn

from rlcore.spi import TokenBatch


class Float64Norm(nn.Module):
    """weight · x / √(mean x² + ε)."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.weight, self.epsilon = norm.weight, norm.variance_epsilon

    def forward(self, states: Tensor) -> Tensor:
        return self.weight * states / (states.square().mean(-1, keepdim=True) + self.epsilon).sqrt()


class Float64Rotary(nn.Module):
    """cos and sin of position / θ^(2i / head size), twice in a row."""

    def __init__(self, config: object) -> None:
        super().__init__()
        self.theta, self.size = config.rope_parameters["rope_theta"], config.head_dim

    def forward(self, states: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        frequencies = self.theta ** -(torch.arange(0, self.size, 2, dtype=torch.float64) / self.size)
        angles = (position_ids.double()[..., None] * frequencies).repeat(1, 1, 2)
        return angles.cos(), angles.sin()


class Float64Reference(Reference):
    """`Reference` in float64."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, dtype=torch.float64)
        self.model.set_experts_implementation("eager")
        for name, module in list(self.model.named_modules()):
            if type(module).__name__.endswith("RMSNorm"):
                self.model.set_submodule(name, Float64Norm(module))
        self.model.model.rotary_emb = Float64Rotary(self.model.config)

    def tensors(self) -> dict[str, Tensor]:
        """The weights, a tied one once."""
        return dict(self.model.named_parameters())

    def step(self, batch: TokenBatch) -> tuple[float, float]:
        """One step, clipped to exactly the greatest norm; returns loss and the gradient's norm before clipping."""
        loss = self.backward(batch)
        gradients = [parameter.grad for parameter in self.model.parameters()]
        norm = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()
        for gradient in gradients:
            gradient.mul_(min(1.0, self.spec.max_grad_norm / norm))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss, norm.item()

    def logprobs(self, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        with wide_softmax():
            return super().logprobs(batch)


@contextmanager
def wide_softmax() -> Iterator[None]:
    """Let softmax of attention and routers keep the dtype of its input."""
    softmax = nn.functional.softmax
    with mock.patch.object(nn.functional, "softmax", lambda states, dim, dtype=None: softmax(states, dim)):
        yield
