"""The shares that ranks have of a parameter, and its rows that belong to each of its Hugging Face tensors."""

from torch import Tensor

from rlcore_megatron.layout import ParallelLayout
from rlcore_megatron.weight_mapping import Source


def tensor_rank_and_size(source: Source, layout: ParallelLayout) -> tuple[int, int]:
    """This rank's number among those that divide the source's tensors, and how many they are."""
    if source.expert is None:
        return layout.tensor_rank, layout.tensor
    return layout.expert_tensor_rank, layout.expert_tensor


def source_shape(source: Source, size: int) -> tuple[int, ...]:
    """What one of `size` tensor ranks has of the parameter."""
    shapes = [tensor.shard_shape(size) for tensor in source.tensors]
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def rows_of(parameter: Tensor, source: Source, size: int) -> tuple[Tensor, ...]:
    """Views [groups, rows, ...] of a contiguous parameter, one for each of the source's tensors.

    With groups and rows flattened, each is what this rank has of the tensor where `size` tensor ranks divide it.
    """
    groups = source.local_groups(size)
    rows = [tensor.shard_shape(size)[0] // groups for tensor in source.tensors]
    return parameter.unflatten(0, (groups, -1)).split(rows, 1)
