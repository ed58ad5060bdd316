"""Chooses when gradients of several microbatches are reduced: once a step, unless there is no room for them until then."""

from collections.abc import Iterable
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from rlcore_fsdp2.config import MOST_HELD

DIVIDED_BEFORE = ("tensor", "expert")
"""The dimensions of meshes that divide parameters before FSDP shards them, and whose ranks keep their own part's gradient."""


def reduces_every_microbatch(wanted: bool | None, parameters: Iterable[Tensor], memory_bytes: int | None) -> bool:
    """As the section wants it, or where it leaves that open whether float32 gradients that FSDP has not sharded yet are larger
    than MOST_HELD of the device's memory, None of a host's. A collective: all ranks do the same."""
    if wanted is not None:
        return wanted
    if memory_bytes is None:
        return False
    held = 4 * sum(map(held_elements, parameters))
    return _on_any_rank(held > MOST_HELD * memory_bytes)


def held_elements(parameter: Tensor) -> int:
    """The elements that this rank has of a parameter while FSDP has gathered it."""
    if not isinstance(parameter, DTensor):
        return parameter.numel()
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or ()
    divided = [
        mesh.size(dim)
        for dim, (name, placement) in enumerate(zip(names, parameter.placements, strict=True))
        if name in DIVIDED_BEFORE and isinstance(placement, Shard)
    ]
    return parameter.numel() // prod(divided)


def _on_any_rank(flag: bool) -> bool:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return flag
    found = torch.tensor(int(flag), device="cuda" if dist.get_backend() == "nccl" else "cpu")
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return bool(found)
