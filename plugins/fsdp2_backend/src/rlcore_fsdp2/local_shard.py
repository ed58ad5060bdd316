"""The slice of a tensor that a rank holds."""

from attrs import evolve, frozen
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rlcore_fsdp2.sharding import is_first_copy


@frozen(kw_only=True)
class LocalShard:
    """A block of a global tensor."""

    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> "LocalShard":
        """This rank's block of `tensor`."""
        if not isinstance(tensor, DTensor):
            return cls(global_shape=tuple(tensor.shape), offset=(0,) * tensor.ndim, shape=tuple(tensor.shape))
        shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        return cls(global_shape=tuple(tensor.shape), offset=tuple(offset), shape=tuple(shape))

    @classmethod
    def written(cls, tensor: Tensor) -> "LocalShard":
        """This rank's block, empty where another rank writes the same."""
        part = cls.of(tensor)
        return part if is_first_copy(tensor) else evolve(part, shape=(0,) * tensor.ndim)

    @property
    def is_empty(self) -> bool:
        return 0 in self.shape

    def overlap(self, other: "LocalShard") -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
        """Return the common part of the two blocks, as slices into this one and into the other; None where they have none."""
        mine, theirs = [], []
        for begin, size, other_begin, other_size in zip(self.offset, self.shape, other.offset, other.shape, strict=True):
            first, beyond = max(begin, other_begin), min(begin + size, other_begin + other_size)
            if first >= beyond:
                return None
            mine.append(slice(first - begin, beyond - begin))
            theirs.append(slice(first - other_begin, beyond - other_begin))
        return tuple(mine), tuple(theirs)
