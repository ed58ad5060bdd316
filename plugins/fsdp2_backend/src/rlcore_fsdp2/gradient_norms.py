"""The norm of each exported tensor's gradient, over all ranks."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from rlcore_fsdp2.export import Exporter, exported_tensors, whole
from rlcore_fsdp2.layout import ParallelLayout
from rlcore_fsdp2.sharding import local, num_copies
from rlcore_torchkit.optimizer.gradient_norms import squared_sum


@torch.no_grad()
def gradient_norms(model: Any, exporter: Exporter, device: torch.device, layout: ParallelLayout) -> dict[str, float]:
    """The L2 norm of the gradient of each tensor that trains, by its name in exports, the same on each rank. A collective.

    A rank adds up the squares of its own part of a gradient. Where exports divide a parameter, ranks gather the gradient, one
    parameter at a time, and divide it as the weight: that moves elements and changes none.
    """
    parameters: dict[str, Any] = {name: each for name, each in exported_tensors(model).items() if each.requires_grad}
    owners = {name: each for each in exporter.exported for name in each.parameters}
    squares = dict[str, Tensor]()
    for name, parameter in parameters.items():
        owner = owners.get(name)
        if owner is None or owner.is_itself:  # an adapter has no owner
            gradient = _gradient(parameter)
            squares[name] = squared_sum(local(gradient)) / num_copies(gradient)
        elif name == owner.parameter:  # the first of those that exports hold as one
            gradients = {each: whole(_gradient(parameters[each]), parameters[each].dtype, device) for each in owner.parameters}
            for key, part in revert_weight_conversion(model, gradients).items():
                squares[key] = squared_sum(part) / layout.world_size
    sums = torch.stack([each.to(device) for each in squares.values()])
    if layout.world_size > 1:
        dist.all_reduce(sums)
    return dict(zip(squares, sums.sqrt().tolist(), strict=True))


def _gradient(parameter: nn.Parameter) -> Tensor:
    """A parameter's gradient: zeros where the loss does not depend on it."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
