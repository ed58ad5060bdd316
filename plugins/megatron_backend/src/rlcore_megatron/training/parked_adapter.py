"""Adapters that are not in use: this rank's parts, and all else that is an adapter's own.

Adapters are float32, so that Megatron's optimizer updates the parameters themselves and has no masters of them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attrs import frozen
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from rlcore_megatron.training.optimizer_state import optimizers_of


@frozen(kw_only=True, eq=False)
class ParkedAdapter:
    """One adapter."""

    weights: Sequence[Tensor]
    gradients: Sequence[Tensor]
    """Copies of the gradient buffers; none where no gradients are held."""
    moments: Sequence[Mapping[Any, Any]]
    """The state of each inner optimizer."""
    steps: Sequence[Sequence[Any]]
    """The count of steps of each of its groups; None before the first."""
    seed: int
    rank: int | None
    begun: Mapping[str, Tensor] | None
    weight_version: int
    num_accumulated: int
    """Microbatches whose gradients are held."""


def park(
    models: Sequence[Any],
    optimizer: MegatronOptimizer,
    *,
    seed: int,
    rank: int | None,
    begun: Mapping[str, Tensor] | None,
    weight_version: int,
    num_accumulated: int,
) -> ParkedAdapter:
    """Copy the adapter in use, and clear the optimizer's state."""
    inner = optimizers_of(optimizer)
    parked = ParkedAdapter(
        weights=[parameter.detach().clone() for parameter in _trained(models)],
        gradients=[buffer.clone() for buffer in _gradient_buffers(models)] if num_accumulated else [],
        moments=[dict(one.state) for one in inner],
        steps=[[group.get("step") for group in one.param_groups] for one in inner],
        seed=seed,
        rank=rank,
        begun=begun,
        weight_version=weight_version,
        num_accumulated=num_accumulated,
    )
    clear(optimizer)
    return parked


@torch.no_grad()
def put_back(models: Sequence[Any], optimizer: MegatronOptimizer, parked: ParkedAdapter) -> None:
    """Make a parked adapter the one in use."""
    for parameter, weights in zip(_trained(models), parked.weights, strict=True):
        parameter.copy_(weights)
    for buffer, gradients in zip(_gradient_buffers(models) if parked.gradients else (), parked.gradients, strict=True):
        buffer.copy_(gradients)
    for one, moments, steps in zip(optimizers_of(optimizer), parked.moments, parked.steps, strict=True):
        one.state.clear()
        one.state.update(moments)
        for group, step in zip(one.param_groups, steps, strict=True):
            group.pop("step", None)
            group.update({} if step is None else {"step": step})


def clear(optimizer: MegatronOptimizer) -> None:
    """Forget moments and counts of steps."""
    for one in optimizers_of(optimizer):
        one.state.clear()
        for group in one.param_groups:
            group.pop("step", None)


def _trained(models: Sequence[Any]) -> list[Tensor]:
    return [parameter for model in models for parameter in model.parameters() if parameter.requires_grad]


def _gradient_buffers(models: Sequence[Any]) -> list[Tensor]:
    return [buffer.grad_data for model in models for buffer in (*model.buffers, *model.expert_parallel_buffers)]
