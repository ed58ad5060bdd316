"""Muon's update of matrices that ranks hold in parts: each matrix is whole on one rank while it is orthogonalized.

FSDP's ranks divide the matrices among themselves, and exchange the parts of as many at a time as there are ranks. Parts travel
in bfloat16 both ways, to which the iteration rounds first. Tensor ranks gather their parts, and each computes the whole. Stacks
of experts are divided by experts, so that a rank has whole matrices.

Shapes: A rows and B columns of a parameter, a rows and b columns of this rank's part.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from rlcore.spi import MuonSpec
from rlcore_fsdp2.sharding import held_part, local
from rlcore_fsdp2.trained_parameters import TrainedParameter
from rlcore_torchkit.optimizer import muon
from rlcore_torchkit.optimizer.muon import orthogonalized, update_scale

FSDP, TENSOR = "fsdp", "tensor"
"""The dimensions of meshes that divide matrices. FSDP divides the rows of what tensor ranks have."""


def exchanges(parameter: DTensor) -> bool:
    """Return whether ranks hold parts of one matrix: stacks [E, A, B] are divided by experts."""
    return parameter.ndim == 2 and any(size > 1 and not placement.is_replicate() for _, size, placement in _sizes(parameter))


def update_whole(member: TrainedParameter, update: Tensor, rate: float, spec: MuonSpec, device: torch.device) -> None:
    """Update matrices that this rank has whole, [A, B] or [e, A, B] of e experts, by Muon's mean of their gradient, of the same
    shape. `device` computes."""
    part = local(member.parameter)
    part.mul_(1 - rate * member.settings.weight_decay)
    for matrix in member.matrices:
        block = (..., slice(*matrix.rows), slice(*matrix.columns))
        stack = update[block].to(device)
        if stack.numel():
            changed = orthogonalized(stack if stack.ndim == 3 else stack[None], spec).view(stack.shape)
            part[block].add_(changed.to(part.device), alpha=-rate * update_scale(*matrix.shape, spec))


def update_divided(
    members: Sequence[TrainedParameter],
    update_of: Callable[[TrainedParameter], Tensor],
    rate: float,
    spec: MuonSpec,
    device: torch.device,
) -> None:
    """Update this rank's parts [a, b] of matrices of one mesh by `update_of` each: Muon's mean of the gradient [a, b]. A
    collective, which runs on `device`."""
    mesh: Any = members[0].parameter.device_mesh
    group = mesh.get_group(FSDP)
    for first in range(0, len(members), group.size()):
        several = members[first : first + group.size()]
        parts = [update_of(member).to(device, muon.PRECISION) for member in several]
        rows = [_rows_of_ranks(member.parameter, group.size()) for member in several]
        columns = [part.shape[1] for part in parts]
        sent = [part.numel() for part in parts] + [0] * (group.size() - len(parts))
        own = group.rank() if group.rank() < len(several) else None
        received = [0] * group.size() if own is None else [count * columns[own] for count in rows[own]]
        gathered = _exchanged(torch.cat([part.flatten() for part in parts]), sent, received, group)
        changed = gathered
        if own is not None:
            changed = _orthogonalized(several[own], gathered.view(-1, columns[own]), spec).flatten()
        returned = _exchanged(changed, received, sent, group).split(sent[: len(parts)])
        for member, part, change in zip(several, parts, returned, strict=True):
            _apply(member, change.view(part.shape), rate, spec)


def _sizes(parameter: DTensor) -> list[tuple[str, int, Any]]:
    """Name, size and placement of each dimension of a parameter's mesh."""
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or ()
    return [(name, mesh.size(dim), parameter.placements[dim]) for dim, name in enumerate(names)]


def _rows_of_ranks(parameter: DTensor, size: int) -> list[int]:
    """The rows that each of FSDP's ranks holds of a parameter, or of its tensor rank's part of it."""
    rows = parameter.shape[0]
    for name, ranks, placement in _sizes(parameter):
        if name == TENSOR and isinstance(placement, Shard) and placement.dim == 0:
            rows //= ranks  # layers that do not divide equally are refused
    each = -(-rows // size)
    return [max(0, min(each, rows - rank * each)) for rank in range(size)]


def _exchanged(values: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """Return the elements that this rank receives, in the order of ranks; `sent` and `received` are their numbers by rank."""
    found = values.new_empty(sum(received))
    dist.all_to_all_single(found, values, received, sent, group=group)
    return found


def _orthogonalized(member: TrainedParameter, part: Tensor, spec: MuonSpec) -> Tensor:
    """PRECISION [a, b]: this tensor rank's part of the orthogonalized matrices of a parameter, of its part PRECISION [a, b]."""
    divided = [(name, placement) for name, size, placement in _sizes(member.parameter) if name == TENSOR and size > 1]
    whole, mine = part, None
    if divided and isinstance(divided[0][1], Shard):
        mesh, shape = member.parameter.device_mesh[TENSOR], member.parameter.shape
        shared = DTensor.from_local(part, mesh, [divided[0][1]], run_check=False, shape=shape, stride=(shape[1], 1))
        whole, mine = shared.full_tensor(), held_part("", shared)
    changed = torch.empty_like(whole, dtype=muon.PRECISION)
    for matrix in member.matrices:
        block = slice(*matrix.rows), slice(*matrix.columns)
        changed[block] = orthogonalized(whole[block][None], spec)[0]
    return changed if mine is None else changed[tuple(map(slice, mine.start, mine.stop))].contiguous()


def _apply(member: TrainedParameter, changed: Tensor, rate: float, spec: MuonSpec) -> None:
    """Decay this rank's part [a, b] of a parameter, and move it by its part of the orthogonalized matrices."""
    part, held = local(member.parameter), held_part("", member.parameter)
    changed = changed.to(part.device)
    part.mul_(1 - rate * member.settings.weight_decay)
    for matrix in member.matrices:
        start = max(held.start[0], matrix.rows[0]), max(held.start[1], matrix.columns[0])
        stop = min(held.stop[0], matrix.rows[1]), min(held.stop[1], matrix.columns[1])
        block = tuple(slice(a - o, max(a, b) - o) for a, b, o in zip(start, stop, held.start, strict=True))
        part[block].add_(changed[block], alpha=-rate * update_scale(*matrix.shape, spec))
