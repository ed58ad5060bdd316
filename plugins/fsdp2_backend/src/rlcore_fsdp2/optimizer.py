"""AdamW, and the gradient's global norm."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlcore.spi import OptimizerSpec
from rlcore_fsdp2.adapters import trained
from rlcore_fsdp2.sharding import local, num_copies


def make_optimizer(model: nn.Module, spec: OptimizerSpec) -> torch.optim.AdamW:
    """AdamW over the float32 parameters of `model` that train: matrices with weight decay, biases and vectors without."""
    groups = [
        {"params": members, "weight_decay": spec.weight_decay if decays else 0.0}
        for (_, decays), members in _groups(trained(model)).items()
    ]
    # The fused kernel serves CPU too, where it takes a quarter of the time of the plain one.
    return torch.optim.AdamW(groups, lr=spec.learning_rate, betas=spec.betas, eps=spec.eps, fused=True)


def _groups(parameters: Mapping[str, nn.Parameter]) -> dict[tuple[object, bool], list[nn.Parameter]]:
    """Parameters of each mesh, since one fused operation takes the tensors of one, that decay and that do not. The biases of
    all experts of a layer may be one matrix."""
    groups: dict[tuple[object, bool], list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        decays = parameter.ndim > 1 and not name.endswith("bias")
        groups.setdefault((mesh, decays), []).append(parameter)
    return groups


def local_norms(gradients: Iterable[Tensor]) -> Tensor:
    """float64 [P]: L2 norm of this rank's part of each gradient."""
    return torch.stack(torch._foreach_norm([local(gradient) for gradient in gradients])).double()


def squared_norm(gradients: Sequence[Tensor]) -> Tensor:
    """float64 scalar: what this rank adds to the square of the global L2 norm; elements on several ranks are shared between."""
    squares = local_norms(gradients).square()
    copies = [num_copies(gradient) for gradient in gradients]
    if max(copies) > 1:
        squares = squares / torch.tensor(copies, device=squares.device)
    return squares.sum()


def clip(gradients: Iterable[Tensor], norm: float, max_norm: float) -> None:
    """Scale the gradients, in place, so that their global L2 norm, now `norm`, is at most `max_norm`; 0.0 leaves them."""
    if 0.0 < max_norm < norm:
        torch._foreach_mul_([local(gradient) for gradient in gradients], max_norm / norm)
