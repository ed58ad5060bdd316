"""A rank's part of the optimizer's state, as tensors that Megatron's distributed checkpoints can divide anew.

DistributedOptimizer lays all parameters end to end and cuts that into equal parts for the ranks that hold the same weights: of
a parameter a rank has a run of elements in row-major order. Such a run consists of a few boxes, and boxes of the whole tensor
are what the format stores: each rank writes its own, and one of any other layout reads those that overlap with its own.
"""

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch
from attrs import frozen
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from torch import Tensor

from rlcore_megatron.modules.model import unwrapped
from rlcore_megatron.weights.element_runs import rectangles
from rlcore_torchkit.optimizer.settings import BLOCK

CONTENT = {"singleton_local_shards": True, "non_homogeneous_layers": True}
"""Megatron's metadata of a state dict in which every layer, every expert and each half of a gated projection has its own name,
whatever the layout."""


@frozen(kw_only=True, eq=False)
class Piece:
    """A parameter, or a part of one that the format stores under a name of its own."""

    name: str
    global_shape: tuple[int, ...]
    shape: tuple[int, ...]
    """The shape of the tensor that this rank's model has."""
    offset: tuple[int, ...]
    """The offset of that tensor in the whole one."""
    first: int
    """The index of its first element among those of this rank's parameter."""
    replica: tuple[int, ...]
    """Zeros on one of the ranks whose models have it."""


@frozen(kw_only=True, eq=False)
class Shard:
    """The elements `first` to `beyond` - 1 of one of this rank's parameters, whose optimizer state this rank holds."""

    pieces: Sequence[Piece]
    first: int
    beyond: int
    optimizer: torch.optim.Optimizer
    key: Tensor
    """[beyond - first], what the optimizer updates and keeps its state by. In float32, and a view of the parameter itself where
    that is float32; with `use_precision_aware_optimizer`, and of ShardStates, always a view of the parameter."""

    @property
    def state(self) -> dict[str, Any]:
        """The optimizer's state for it; empty before the first step."""
        found: dict[str, Any] = self.optimizer.state.get(self.key, {})
        return found

    def divided(self, prefix: str, run: Tensor) -> list[ShardedTensor]:
        """`run` [beyond - first], this rank's elements of what goes by the parameter's names after `prefix`, as views."""
        found, position = [], 0
        for piece in self.pieces:
            for offset, shape in boxes(piece.shape, *self._bounds(piece)):
                data = run[position : position + prod(shape)].view(shape)
                place = tuple(map(sum, zip(piece.offset, offset, strict=True)))
                found.append(_sharded(f"{prefix}{piece.name}", data, piece.global_shape, place, piece.replica))
                position += prod(shape)
        return found

    def divided_scales(self, prefix: str, scales: Tensor, *, is_read: bool) -> list[ShardedTensor]:
        """`scales` [rows, K] of the blocks of the rows that this rank has elements of, as views. Of a block that several ranks
        share the one with its first element writes the scale, and each reads it."""
        found = []
        for piece in self.pieces:
            row_elements = prod(piece.shape[1:])
            row_of_first = self.first // row_elements - piece.first // row_elements  # a piece begins with a row
            for top, left, height, width in rectangles(row_elements, *self._bounds(piece)):
                column = left + (piece.offset[1] if len(piece.offset) == 2 else 0)
                begin, end = column // BLOCK if is_read else -(-column // BLOCK), -(-(column + width) // BLOCK)
                if begin < end:
                    data = scales[top - row_of_first : top - row_of_first + height, begin:end]
                    shape, place = (piece.global_shape[0], scales.shape[1]), (piece.offset[0] + top, begin)
                    found.append(_sharded(f"{prefix}{piece.name}", data, shape, place, piece.replica))
        return found

    def _bounds(self, piece: Piece) -> tuple[int, int]:
        """The first of this rank's elements of a piece, and the one beyond the last."""
        return max(self.first - piece.first, 0), min(self.beyond - piece.first, prod(piece.shape))


def boxes(shape: Sequence[int], first: int, beyond: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offsets and shapes of the boxes that make up elements `first` to `beyond` - 1 of a row-major array, in their order.

    Whole rows are one box; what is left of a row before and after them is divided likewise.
    """
    if first >= beyond:
        return
    if len(shape) == 1:
        yield (first,), (beyond - first,)
        return
    width = prod(shape[1:])
    top, bottom = -(-first // width), beyond // width
    if first < top * width:
        row, end = top - 1, min(beyond, top * width)
        yield from _in_row(shape, row, first - row * width, end - row * width)
    if top < bottom:
        yield (top, *(0 for _ in shape[1:])), (bottom - top, *shape[1:])
    if bottom * width < beyond and top <= bottom:
        yield from _in_row(shape, bottom, 0, beyond - bottom * width)


def _in_row(shape: Sequence[int], row: int, first: int, beyond: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for offset, size in boxes(shape[1:], first, beyond):
        yield (row, *offset), (1, *size)


def _sharded(
    name: str, data: Tensor, shape: tuple[int, ...], offset: tuple[int, ...], replica: tuple[int, ...]
) -> ShardedTensor:
    return ShardedTensor(
        key=name,
        data=data,
        dtype=data.dtype,
        local_shape=tuple(data.shape),
        global_shape=shape,
        global_offset=offset,
        axis_fragmentations=None,  # no regular grid
        replica_id=replica,
    )


def shards_of(models: Sequence[Any], optimizer: MegatronOptimizer) -> list[Shard]:
    """Return the shards of this rank, of the dense parameters' optimizer and of the experts'."""
    entries = _entries(models)
    return [shard for part in parts_of(optimizer) for shard in _shards_of_part(part, entries)]


def parts_of(optimizer: MegatronOptimizer) -> list[Any]:
    """The distributed optimizers that it consists of: experts are divided over other ranks than what is dense."""
    parts = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    return [part for part in parts if not part.is_stub_optimizer]


def _shards_of_part(part: Any, entries: dict[int, list[Piece]]) -> Iterator[Shard]:
    for parameter, (group, order) in part.model_param_group_index_map.items():
        own = part._get_model_param_range_map(parameter)["param"]
        yield Shard(
            pieces=entries[id(parameter)],
            first=own.start,
            beyond=own.end,
            optimizer=part.optimizer,
            key=part.optimizer.param_groups[group]["params"][order],
        )


def _entries(models: Sequence[Any]) -> dict[int, list[Piece]]:
    """Each parameter's pieces, by its identity."""
    found = {}
    for model in unwrapped(models):
        state, _ = extract_sharded_tensors_and_factories(model.sharded_state_dict(metadata=dict(CONTENT)))
        for entry in nested_values(state):
            found[id(entry.data)] = _pieces(entry)
    return found


def _pieces(entry: ShardedTensor | ShardedTensorFactory) -> list[Piece]:
    """The pieces of a parameter, in the order in which they lie in it."""
    origin = entry.data.storage_offset()
    tensors = list(nested_values({"": entry.build()})) if isinstance(entry, ShardedTensorFactory) else [entry]
    place = entry.data.untyped_storage().data_ptr()
    assert all(tensor.data.is_contiguous() and tensor.data.untyped_storage().data_ptr() == place for tensor in tensors)
    pieces = [
        Piece(
            name=tensor.key,
            global_shape=tensor.global_shape,
            shape=tuple(tensor.local_shape),
            offset=tensor.global_offset,
            first=tensor.data.storage_offset() - origin,
            # The last number tells the ranks apart that hold the same weights, each of which has its own part of the state.
            replica=(*tensor.replica_id[:-1], 0),
        )
        for tensor in tensors
    ]
    return sorted(pieces, key=lambda piece: piece.first)
