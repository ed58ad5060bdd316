"""The shards of exported tensors that a rank holds and sends without gathering."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from attrs import frozen
from torch import Tensor

from rlcore.spi import DtypeName, ShardSlice, TensorSpec
from rlcore_megatron.families.weight_source import HfTensor, Source
from rlcore_megatron.layouts.layout import ParallelLayout
from rlcore_megatron.weights.parameter_rows import largest_share, row_ranges, tensor_rank_and_size
from rlcore_torchkit.refit.shard_sender import ReadParts


@frozen(kw_only=True, eq=False)
class Exported:
    """One tensor of the export and who has it."""

    tensor: HfTensor
    source: Source
    index: int
    """The index of the tensor among the source's."""
    stage: int
    """The pipeline rank that sends it where it is gathered."""
    expert_rank: int | None
    """The expert-parallel rank that sends it then; None for what is no expert's."""
    parameter: tuple[int, str] | None
    """The number of the model chunk and the name of the parameter, on ranks that hold a share of it."""

    def sent_shape(self, size: int) -> tuple[int, ...]:
        """Return the shape that each of `size` tensor ranks sends: the same of all, whose end may mean nothing."""
        return largest_share(self.source, self.index, size)

    @property
    def sender(self) -> tuple[int, int | None, DtypeName | None]:
        """The sender, and the dtype of the tensor's own: tensors that are alike in these travel together."""
        return self.stage, self.expert_rank, self.tensor.dtype


@frozen(kw_only=True, eq=False)
class Part:
    """A block of a tensor of the files, made of one share, or of all shares that take turns in its rows."""

    box: ShardSlice
    items: Sequence[Exported]
    share: Callable[[Exported], Tensor]

    def read(self) -> Tensor:
        """[box's shape], a view where the rows of the parameter are in the files' order."""
        if self.items[0].tensor.place is None:
            return self.share(self.items[0]).reshape(self.box.shape)
        shares = [self.share(item) for item in self.items]
        block = shares[0].new_empty(self.box.shape)
        for item, share in zip(self.items, shares, strict=True):
            assert item.tensor.place is not None
            rows = item.tensor.place.taken(block)
            rows.copy_(share.reshape(rows.shape))
        return block


def parts_of(items: Iterable[Exported], layout: ParallelLayout, share: Callable[[Exported], Tensor]) -> list[Part]:
    """This rank's part of each tensor of which it has some. `share` reads its [groups, rows, ...] of an item."""
    found: dict[ShardSlice, list[Exported]] = defaultdict(list)
    for item in items:
        if item.parameter is not None and (box := box_of(item, layout)).size:
            found[box].append(item)
    return [Part(box=box, items=of_box, share=share) for box, of_box in found.items()]


def box_of(item: Exported, layout: ParallelLayout) -> ShardSlice:
    """Return the place of this rank's share in its tensor of the files."""
    (rank, size), tensor = tensor_rank_and_size(item.source, layout), item.tensor
    places = [row_ranges(item.source, rank, size)[item.index]]
    for dim, length in enumerate(tensor.shard_shape(size)[1:], 1):
        place = rank if tensor.tp_dim == dim else 0
        places.append(slice(length * place, length * (place + 1)))
    if tensor.place is not None:
        places = tensor.place.bounds(places[0], places[1:])
    return ShardSlice(tensor.file_name, tuple(place.start for place in places), tuple(place.stop for place in places))


def reader(parts: Iterable[Part]) -> ReadParts:
    """Reads the parts of the tensors that are asked for."""
    by_name: dict[str, list[Part]] = defaultdict(list)
    for part in parts:
        by_name[part.box.name].append(part)

    def read(specs: Sequence[TensorSpec]) -> Mapping[ShardSlice, Tensor]:
        return {part.box: part.read() for spec in specs for part in by_name[spec.name]}

    return read
