"""AdamW, and the gradient's global norm."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from rlcore_fsdp2.config import OptimizerConfig
from rlcore_fsdp2.sharding import local


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over the float32 parameters of `model`: matrices with weight decay, vectors without."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    # The fused kernel serves CPU too, where it takes a quarter of the time of the plain one.
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=True)


def local_norms(gradients: Iterable[Tensor]) -> Tensor:
    """float64 [P]: L2 norm of this rank's part of each gradient."""
    return torch.stack(torch._foreach_norm([local(gradient) for gradient in gradients])).double()


def clip(gradients: Iterable[Tensor], norm: float, max_norm: float) -> None:
    """Scale the gradients, in place, so that their global L2 norm, now `norm`, is at most `max_norm`; 0.0 leaves them."""
    if 0.0 < max_norm < norm:
        torch._foreach_mul_([local(gradient) for gradient in gradients], max_norm / norm)
