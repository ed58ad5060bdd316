"""The source of one of Megatron's parameters: tensors of Hugging Face's files, and the order of its rows."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from attrs import field, frozen

if TYPE_CHECKING:
    from torch import Tensor

from rlcore.spi.weights import DtypeName

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
MULTI_TOKEN_HEAD = "multi_token_head."
"""Prefix of the names of the multi-token head's parameters."""


@frozen(kw_only=True)
class Stack:
    """A place in a tensor of all of a layer's experts, [experts, ..., rows], whose matrices are transposed."""

    name: str
    shape: tuple[int, ...]
    expert: int
    part: int = 0
    """The first of the rows, of which each `num_parts`-th is the tensor's."""
    num_parts: int = 1

    @property
    def is_first(self) -> bool:
        """Return whether it is the first place in the stack."""
        return self.expert == self.part == 0

    def bounds(self, rows: slice, columns: Sequence[slice]) -> list[slice]:
        """The block of the stack among whose rows these of the tensor are every `num_parts`-th, from `part` on."""
        within = slice(rows.start * self.num_parts, rows.stop * self.num_parts)
        return [slice(self.expert, self.expert + 1), *columns, within]

    def taken(self, block: "Tensor") -> "Tensor":
        """[tensor's rows, ...], a view, from such a block."""
        return block[0].movedim(-1, 0)[self.part :: self.num_parts]


@frozen(kw_only=True)
class Blocks:
    """A place in a tensor whose rows are several tensors' in turn: of each `period` rows, `size` from `first` on."""

    name: str
    shape: tuple[int, ...]
    first: int
    size: int
    period: int

    @property
    def is_first(self) -> bool:
        """Return whether it is the first place in the tensor."""
        return self.first == 0

    @property
    def _is_one(self) -> bool:
        return self.period == self.shape[0]

    def bounds(self, rows: slice, columns: Sequence[slice]) -> list[slice]:
        """The block of the file's tensor with these rows: they alone where they are one run, else all of these periods."""
        if self._is_one:
            return [slice(self.first + rows.start, self.first + rows.stop), *columns]
        return [slice(rows.start // self.size * self.period, rows.stop // self.size * self.period), *columns]

    def taken(self, block: "Tensor") -> "Tensor":
        """[tensor's rows, ...] or [periods, rows, ...], a view, from such a block."""
        return block if self._is_one else block.unflatten(0, (-1, self.period))[:, self.first : self.first + self.size]


@frozen(kw_only=True)
class HfTensor:
    """One tensor of a model file."""

    name: str
    shape: tuple[int, ...]
    tp_dim: Literal[0, 1] | None = None
    """The dimension that tensor ranks divide; None where each has all of it."""
    dtype: DtypeName | None = None
    """The dtype that exports keep it in, whatever the others are cast to; None for one that is cast."""
    fused: tuple[str, int, int] | None = field(default=None, eq=False)
    """Its place in a file that keeps a layer's experts in one tensor: that tensor's name, the expert, and the first row."""

    place: "Stack | Blocks | None" = None
    """Its place in files, and exports with them, that have it in a larger tensor; `name` is then that of no tensor."""

    @property
    def file_name(self) -> str:
        """The name of the tensor of the files that it is, or is in."""
        return self.name if self.place is None else self.place.name

    @property
    def file_shape(self) -> tuple[int, ...]:
        """The shape of that tensor."""
        return self.shape if self.place is None else self.place.shape

    def columns(self) -> list[slice]:
        """All of each dimension behind the first."""
        return [slice(0, length) for length in self.shape[1:]]

    def shard_shape(self, size: int) -> tuple[int, ...]:
        """Return the shape of the part that one of `size` ranks has."""
        return tuple(length // size if dim == self.tp_dim else length for dim, length in enumerate(self.shape))


@frozen(kw_only=True)
class Source:
    """One parameter of the whole model."""

    parameter: str
    """Megatron's name of it in a model that is not divided, with layers numbered through, experts too."""
    tensors: tuple[HfTensor, ...]
    """The tensors that its rows are taken from: of each query group, or tensor rank, first some of the first tensor, then of
    the next."""
    groups: int | None = None
    """Query groups that the rows are ordered by; None where each tensor rank has one run of every tensor."""
    layer: int | None = None
    expert: int | None = None

    @property
    def trains(self) -> bool:
        """Return whether the parameter trains: indexers and routers' corrections never do."""
        return ".indexer." not in self.parameter and not self.parameter.endswith(".router.expert_bias")

    def local_groups(self, size: int) -> int:
        """Return the number of groups that each of `size` ranks has, or has a part of."""
        return 1 if self.groups is None else max(1, self.groups // size)

    def splits_groups(self, size: int) -> bool:
        """Return whether several of `size` ranks share a query group, each a run of its rows, of queries, then key, then
        value."""
        return self.groups is not None and self.groups < size
