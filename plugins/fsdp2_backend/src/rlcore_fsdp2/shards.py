"""The shards of exported tensors that a rank holds. It sends them without gathering where it can."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from rlcore.spi import ShardSlice, TensorSpec
from rlcore_fsdp2.sharding import held_part, local
from rlcore_torchkit.refit.shard_sender import ReadParts


class _Exported(Protocol):
    @property
    def parameter(self) -> str: ...
    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...


ExportedT = TypeVar("ExportedT", bound=_Exported)


class Parts(Generic[ExportedT]):
    """By the tensors' names, blocks of parameters, or whole tensors that are made of a gathered parameter."""

    def __init__(
        self, exported: Iterable[ExportedT], is_sent_as_held: Callable[[ExportedT], bool], parameters: Mapping[str, Tensor]
    ) -> None:
        self._parameters = parameters
        self._owners = {name: each for each in exported for name in each.shapes}
        self._blocks = {
            name: held_part(name, parameters[each.parameter]) for name, each in self._owners.items() if is_sent_as_held(each)
        }

    def held(self) -> list[ShardSlice]:
        """In the order of the export."""
        whole = {
            name: ShardSlice(name, (0,) * len(shape), shape)
            for each in self._owners.values()
            for name, shape in each.shapes.items()
        }
        return [self._blocks.get(name, whole[name]) for name in self._owners]

    def reader(self, gathered: Callable[[ExportedT], Mapping[str, Tensor]]) -> ReadParts:
        """Return a reader; `gathered` makes all tensors of one parameter, the last of which is kept for the next window."""
        last: tuple[str, Mapping[str, Tensor]] = "", {}

        def read(specs: Sequence[TensorSpec]) -> dict[ShardSlice, Tensor]:
            nonlocal last
            found: dict[ShardSlice, Tensor] = {}
            for spec in specs:
                owner, block = self._owners[spec.name], self._blocks.get(spec.name)
                if block is not None:
                    found[block] = local(self._parameters[owner.parameter]).detach()
                    continue
                if last[0] != owner.parameter:
                    last = owner.parameter, gathered(owner)
                found[ShardSlice(spec.name, (0,) * len(spec.shape), spec.shape)] = last[1][spec.name]
            return found

        return read
