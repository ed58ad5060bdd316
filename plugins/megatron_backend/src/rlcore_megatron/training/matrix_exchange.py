"""Exchange of matrices whose elements several ranks hold: one rank has each whole, transforms it, and returns the parts.

The ranks are those of a pipeline stage: tensor, context, expert and data-parallel ranks hold parts of its matrices, and what
Megatron's distributed optimizer gives a rank of them begins and ends anywhere in a row.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor

from rlcore_megatron.layouts.optimizer_memory import ROUND_ELEMENTS
from rlcore_megatron.weights.element_runs import MatrixBlock

Transform: TypeAlias = Callable[[Tensor], Tensor]
"""From [N, rows, columns], whole matrices, to the same shape."""
Placed: TypeAlias = tuple[int, MatrixBlock]
"""The number of a block's first element among those that an owner receives, and the block."""


@frozen(kw_only=True, eq=False)
class Round:
    """Matrices that are exchanged at a time."""

    mine: Sequence[int]
    """Numbers of this rank's blocks, in the order in which they are sent: by owner, then by matrix."""
    sent: Sequence[int]
    """The number of elements that this rank sends to each."""
    received: Sequence[int]
    """The number of elements that this rank, as an owner, receives from each."""
    owned: Sequence[Sequence[Sequence[Placed]]]
    """The blocks of the matrices that this rank has whole, a sequence for each matrix, those of one shape together."""


class MatrixExchange:
    """The exchange of this rank's blocks; every rank of `group` makes one and uses it at the same time."""

    def __init__(self, blocks: Sequence[MatrixBlock], group: Any, most_elements: int = ROUND_ELEMENTS) -> None:
        self._group, self._blocks = group, blocks
        everyone: list[Sequence[MatrixBlock]] = [blocks]
        if dist.get_world_size(group) > 1:
            everyone = [()] * dist.get_world_size(group)
            dist.all_gather_object(everyone, blocks, group=group)
        self.rounds = _rounds(everyone, dist.get_rank(group), most_elements)

    def run(self, number: int, parts: Sequence[Tensor], dtype: torch.dtype, transform: Transform) -> list[Tensor]:
        """Return the transformed matrices' elements in the place of each of `parts`, [n] of this dtype, in the order of `mine`
        of round `number`."""
        found = self.rounds[number]
        sent = torch.cat([*parts]) if parts else torch.empty(0, dtype=dtype, device=torch.cuda.current_device())
        received = self._swapped(sent, found.sent, found.received)
        for matrices in found.owned:
            whole = received.new_empty((len(matrices), *matrices[0][0][1].shape))
            for matrix, blocks in zip(whole, matrices, strict=True):
                for place, block in blocks:
                    view = block.taken(matrix)
                    view.copy_(received[place : place + block.size].view(view.shape))
            for matrix, blocks in zip(transform(whole), matrices, strict=True):
                for place, block in blocks:
                    view = block.taken(matrix)
                    received[place : place + block.size].view(view.shape).copy_(view)
        back = self._swapped(received, found.received, found.sent)
        return list(back.split([self._blocks[number].size for number in found.mine]))

    def _swapped(self, elements: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Return what the ranks of the group send to this one."""
        if len(sent) == 1:
            return elements
        found = elements.new_empty(sum(received))
        dist.all_to_all_single(found, elements, list(received), list(sent), group=self._group)
        return found


def _rounds(everyone: Sequence[Sequence[MatrixBlock]], rank: int, most_elements: int) -> list[Round]:
    """Divide the matrices, in the order of their names, among their holders and among rounds: the same on every rank."""
    holders: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    shapes: dict[str, tuple[int, int]] = {}
    for holder, blocks in enumerate(everyone):
        for number, block in enumerate(blocks):
            holders[block.name][holder].append(number)
            shapes[block.name] = block.shape
    work, rounds = [0] * len(everyone), [dict[str, int]()]
    held = [0] * len(everyone)
    for name in sorted(holders):
        rows, columns = shapes[name]
        owner = min(holders[name], key=lambda holder: (work[holder], holder))
        work[owner] += rows * columns * min(rows, columns)
        if rounds[-1] and held[owner] + rows * columns > most_elements:
            rounds.append({})
            held = [0] * len(everyone)
        held[owner] += rows * columns
        rounds[-1][name] = owner
    return [_round(everyone, holders, owners, rank) for owners in rounds if owners]


def _round(
    everyone: Sequence[Sequence[MatrixBlock]],
    holders: Mapping[str, Mapping[int, Sequence[int]]],
    owners: Mapping[str, int],
    rank: int,
) -> Round:
    names = sorted(owners, key=lambda name: (owners[name], name))
    mine = [number for name in names for number in holders[name].get(rank, ())]
    sent = [0] * len(everyone)
    for number in mine:
        sent[owners[everyone[rank][number].name]] += everyone[rank][number].size
    owned: dict[str, list[Placed]] = {name: [] for name in names if owners[name] == rank}
    received, place = [0] * len(everyone), 0
    for holder, blocks in enumerate(everyone):
        for name in owned:
            for number in holders[name].get(holder, ()):
                owned[name].append((place, blocks[number]))
                received[holder] += blocks[number].size
                place += blocks[number].size
    by_shape: dict[tuple[int, int], list[list[Placed]]] = defaultdict(list)
    for placed in owned.values():
        by_shape[placed[0][1].shape].append(placed)
    return Round(mine=mine, sent=sent, received=received, owned=list(by_shape.values()))
