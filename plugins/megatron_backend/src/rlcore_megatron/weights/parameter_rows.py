"""The shares that ranks have of a parameter, and its rows that belong to each of its Hugging Face tensors."""

from collections.abc import Iterator

from torch import Tensor

from rlcore_megatron.families.weight_source import Source
from rlcore_megatron.layouts.layout import ParallelLayout


def tensor_rank_and_size(source: Source, layout: ParallelLayout) -> tuple[int, int]:
    """This rank's number among those that divide the source's tensors, and how many they are."""
    if source.expert is None:
        return layout.tensor_rank, layout.tensor
    return layout.expert_tensor_rank, layout.expert_tensor


def source_shape(source: Source, size: int) -> tuple[int, ...]:
    """Return the shape of the parameter on one of `size` tensor ranks."""
    if source.splits_groups(size):
        rows = sum(tensor.shape[0] for tensor in source.tensors) // size
    else:
        rows = sum(tensor.shard_shape(size)[0] for tensor in source.tensors)
    return (rows, *source.tensors[0].shard_shape(size)[1:])


def row_ranges(source: Source, rank: int, size: int) -> tuple[slice, ...]:
    """The rows of each of the source's tensors that rank `rank` of `size` has; none of some where ranks share a query group."""
    if source.splits_groups(size):
        return tuple(_shared_ranges(source, rank, size))
    shares = [(tensor.shard_shape(size)[0], rank if tensor.tp_dim == 0 else 0) for tensor in source.tensors]
    return tuple(slice(share * place, share * (place + 1)) for share, place in shares)


def _shared_ranges(source: Source, rank: int, size: int) -> Iterator[slice]:
    assert source.groups is not None
    group, place = divmod(rank, size // source.groups)
    begin = source_shape(source, size)[0] * place
    end, first = begin + source_shape(source, size)[0], 0
    for tensor in source.tensors:
        rows = tensor.shape[0] // source.groups
        low, high = (min(max(bound - first, 0), rows) for bound in (begin, end))
        yield slice(group * rows + low, group * rows + high)
        first += rows


def largest_share(source: Source, index: int, size: int) -> tuple[int, ...]:
    """The shape of the largest share that one of `size` tensor ranks has of one of the source's tensors."""
    ranges = [row_ranges(source, rank, size)[index] for rank in range(size if source.splits_groups(size) else 1)]
    return (max(rows.stop - rows.start for rows in ranges), *source.tensors[index].shard_shape(size)[1:])


def rows_of(parameter: Tensor, source: Source, rank: int, size: int) -> tuple[Tensor, ...]:
    """Views [groups, rows, ...] of a contiguous parameter, one for each of the source's tensors.

    With groups and rows flattened, each is what rank `rank` has of the tensor where `size` tensor ranks divide it.
    """
    return parameter.unflatten(0, (source.local_groups(size), -1)).split(rows_per_group(source, rank, size), 1)


def rows_per_group(source: Source, rank: int, size: int) -> list[int]:
    """Return the number of rows of each of the source's tensors in each group of rank `rank` of `size`."""
    groups = source.local_groups(size)
    return [(found.stop - found.start) // groups for found in row_ranges(source, rank, size)]
