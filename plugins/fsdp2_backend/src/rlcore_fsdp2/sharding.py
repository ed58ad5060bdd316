"""Shards of tensors, and FSDP2 for a Hugging Face causal language model: one group per decoder layer, one for the rest."""

from collections.abc import Iterable
from math import prod
from operator import add
from typing import Any

import torch
import torch.distributed as dist
from attrs import evolve
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rlcore.spi import ModelSpec, ShardSlice
from rlcore_fsdp2.config import Fsdp2Config
from rlcore_fsdp2.layout import Meshes
from rlcore_torchkit.architectures.decoders import described_family, layers_of
from rlcore_torchkit.architectures.modules import ModuleNames
from rlcore_torchkit.trainer.float64 import master_dtype


def shard(model: Any, meshes: Meshes, config: Fsdp2Config, spec: ModelSpec) -> None:
    """Shard `model`, in place, over the meshes for weights and, where there is one, for experts.

    Parameters keep their dtype; layers compute in the model's and gradients are reduced in the masters'. The reduction is a
    sum, not FSDP's usual mean: each rank's loss is already divided by global counts.
    """
    mesh = meshes.fsdp
    options: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=getattr(torch, spec.dtype), reduce_dtype=master_dtype(spec)),
        "offload_policy": CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if config.cpu_offload else OffloadPolicy(),
    }
    reshard_layers = config.reshard_after_forward and meshes.layout.fsdp > 1
    family = described_family(model.config.to_dict())
    modules = ModuleNames() if family is None else family.modules
    for layer in layers_of(model):
        experts = modules.experts_of(layer)
        if meshes.experts is not None and experts is not None:
            fully_shard(experts, mesh=meshes.expert_fsdp, reshard_after_forward=reshard_layers, **options)
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard_layers, **options)
    # The backward pass begins with the root's group, so it stays gathered.
    fully_shard(model, mesh=mesh, reshard_after_forward=False, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule) and mesh.size() > 1:
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)


def reshard(model: nn.Module) -> None:
    """Free the full weights that a forward pass without a backward leaves gathered, and that would grow stale."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, sharing its storage; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def num_copies(tensor: Tensor) -> int:
    """Return the number of ranks that hold each element."""
    if not isinstance(tensor, DTensor):
        return 1
    mesh = tensor.device_mesh
    return prod(mesh.size(dim) for dim, placement in enumerate(tensor.placements) if isinstance(placement, Replicate))


def is_first_copy(tensor: Tensor) -> bool:
    """Return whether this rank is the one of those with the same elements that speaks for them."""
    if not isinstance(tensor, DTensor):
        return True
    mesh = tensor.device_mesh
    replicated = [dim for dim, placement in enumerate(tensor.placements) if isinstance(placement, Replicate)]
    return all(mesh.get_local_rank(dim) == 0 for dim in replicated)


def send_copies(tensors: Iterable[Tensor]) -> None:
    """Give each rank its part of sharded tensors as the one has it that `is_first_copy` names. A collective."""
    for tensor in tensors:
        if not isinstance(tensor, DTensor):
            continue
        mesh, part = tensor.device_mesh, local(tensor).detach()
        # What the first dimensions send to ranks that have nothing yet, the later ones replace.
        for dim, placement in enumerate(tensor.placements):
            if isinstance(placement, Replicate) and mesh.size(dim) > 1 and part.numel():
                dist.broadcast(part, group=mesh.get_group(dim), group_src=0)


def held_part(name: str, tensor: Tensor) -> ShardSlice:
    """The part of a tensor that this rank holds."""
    shape, start = tuple(tensor.shape), (0,) * tensor.ndim
    if isinstance(tensor, DTensor):
        shape, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return ShardSlice(name, tuple(start), tuple(map(add, start, shape)))


def written_part(name: str, tensor: Tensor) -> ShardSlice:
    """`held_part`, empty where another rank writes the same."""
    part = held_part(name, tensor)
    return part if is_first_copy(tensor) else evolve(part, stop=part.start)


def bounds_of(part: ShardSlice) -> tuple[slice, ...]:
    """Return the slices of a tensor that a part takes."""
    return tuple(map(slice, part.start, part.stop))


def fill(tensor: Tensor, whole: Tensor) -> None:
    """Copy this rank's part of `whole` into `tensor`, without gradients."""
    with torch.no_grad():
        local(tensor).copy_(whole[bounds_of(held_part("", tensor))])
