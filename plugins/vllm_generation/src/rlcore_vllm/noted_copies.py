"""The copies that a model's loaders make, noted at the first load and made again without the loaders.

vLLM calls a function for each tensor of a checkpoint, which looks for the name, cuts this rank's part out and copies it. Of a
mixture of experts with its tens of thousands of tensors the calls cost far more than the copies. Where parameters stay as they
were loaded, each refit makes the same copies, so all tensors of a bucket are copied in one call.

A loader that does anything else with a tensor than to copy parts of it is called each time.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from attrs import field, frozen, mutable
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_CONSTANTS = frozenset({torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor, torch.ops.aten.zero_.default})
"""What writes the same whatever is loaded, such as rows that fill up a vocabulary: it needs no second time."""
Weights = Sequence[tuple[str, Tensor]]


@frozen(kw_only=True, eq=False)
class Copy:
    """A part of a tensor that a loader copied."""

    destination: Tensor
    """A view of the parameter."""
    stride: tuple[int, ...]
    offset: int
    """Elements of the tensor before the part's first."""
    is_all: bool
    """Whether the part is the tensor itself."""
    is_flat: bool
    """Whether part and destination are contiguous."""

    def of(self, tensor: Tensor) -> Tensor:
        """The part, of another contiguous tensor of the noted shape."""
        if self.is_all:
            return tensor
        return tensor.as_strided(self.destination.shape, self.stride, tensor.storage_offset() + self.offset)


@mutable(kw_only=True, eq=False)
class Noted:
    """What became of one tensor."""

    shape: torch.Size
    dtype: torch.dtype
    copies: list[Copy] = field(factory=list)
    parameters: set[str] = field(factory=set)
    """Where something was copied to."""
    is_copied_alone: bool = True
    """Whether a loader has done nothing else with it."""


class NotedCopies:
    """What one model's loaders were seen to do."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._noted: dict[str, Noted] = {}
        self._made: set[str] = set()
        """Parameters to which loaders wrote what was no tensor's part."""
        self._addresses: dict[str, int] = {}
        # Experts that vLLM moves between ranks to balance their load are elsewhere at the next refit.
        self._is_fixed = not any(getattr(layer, "enable_eplb", False) for layer in model.modules())

    def begin(self) -> None:
        """A load begins: forget what was noted where a parameter has another memory than then."""
        addresses = {name: parameter.data_ptr() for name, parameter in self._model.named_parameters()}
        if addresses != self._addresses:
            self._noted, self._made, self._addresses = {}, set(), addresses

    def know(self, name: str, tensor: Tensor) -> bool:
        """Whether `repeat` can load this tensor."""
        noted = self._noted.get(name)
        return (
            noted is not None
            and noted.is_copied_alone
            and self._made.isdisjoint(noted.parameters)
            and (noted.shape, noted.dtype) == (tensor.shape, tensor.dtype)
            and tensor.is_contiguous()
        )

    def repeat(self, weights: Weights) -> set[str]:
        """Copy tensors that are known; returns the names of the parameters that have got something."""
        pairs: dict[tuple[Any, ...], tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
        names: set[str] = set()
        for name, tensor in weights:
            noted = self._noted[name]
            names |= noted.parameters
            for copy in noted.copies:
                # One call copies many at once only where none of them is strided or cast.
                destinations, sources = pairs[copy.is_flat, copy.destination.dtype, noted.dtype]
                destinations.append(copy.destination)
                sources.append(copy.of(tensor))
        for destinations, sources in pairs.values():
            torch._foreach_copy_(destinations, sources)
        return names

    @contextmanager
    def noting(self, weights: Weights) -> Iterator[None]:
        """While the model's loaders load these."""
        given = _Given(weights)
        if not self._is_fixed or not given.lie_apart:
            yield
            return
        noted = {
            name: Noted(shape=tensor.shape, dtype=tensor.dtype, is_copied_alone=tensor.is_contiguous())
            for name, tensor in weights
        }
        with _Watch(given, _Owners(self._model), noted, self._made):
            yield
        self._noted |= noted


class _Given:
    """Finds the tensor that some memory is of."""

    def __init__(self, weights: Weights) -> None:
        places = sorted(
            (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, name) for name, tensor in weights if tensor.numel()
        )
        self._starts = [start for start, _, _ in places]
        self._ends = [end for _, end, _ in places]
        self._names = [name for _, _, name in places]
        self._tensors = dict(weights)
        self.lie_apart = len(self._tensors) == len(weights) and all(
            end <= start for end, start in zip(self._ends, self._starts[1:], strict=False)
        )

    def find(self, tensor: Tensor) -> tuple[str, Tensor] | None:
        index = bisect_right(self._starts, tensor.data_ptr()) - 1
        if index < 0 or tensor.data_ptr() >= self._ends[index]:
            return None
        return self._names[index], self._tensors[self._names[index]]


class _Owners:
    """Finds the parameter or buffer that a view is of."""

    def __init__(self, model: nn.Module) -> None:
        held = (*model.named_buffers(), *model.named_parameters())
        self._names = {tensor.untyped_storage().data_ptr(): name for name, tensor in held}

    def find(self, tensor: Tensor) -> str | None:
        return self._names.get(tensor.untyped_storage().data_ptr())


class _Watch(TorchDispatchMode):
    """Sees all that is done with tensors, in this thread."""

    def __init__(self, given: _Given, owners: _Owners, noted: dict[str, Noted], made: set[str]) -> None:
        super().__init__()
        self._given, self._owners, self._noted, self._made = given, owners, noted, made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default:
            self._note_copy(*args[:2])
        else:
            self._note_others(func, _tensors((args, kwargs)), _tensors(result))
        return result

    def _note_copy(self, destination: Tensor, source: Tensor) -> None:
        found, parameter = self._given.find(source), self._owners.find(destination)
        self._spoil_given([destination])
        if found is None:
            if parameter is not None:
                self._made.add(parameter)
            return
        name, tensor = found
        if parameter is None or (source.shape, source.dtype) != (destination.shape, tensor.dtype):
            self._spoil([name])
            return
        offset = (source.data_ptr() - tensor.data_ptr()) // tensor.element_size()
        self._noted[name].copies.append(
            Copy(
                destination=destination,
                stride=source.stride(),
                offset=offset,
                is_all=source.shape == tensor.shape and source.stride() == tensor.stride(),
                is_flat=source.is_contiguous() and destination.is_contiguous(),
            )
        )
        self._noted[name].parameters.add(parameter)

    def _note_others(self, func: Any, arguments: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        """Views are watched themselves; what else reads a tensor, or writes to the model, is to be done each time."""
        memory = {result.untyped_storage().data_ptr() for result in results}
        is_writing = func._schema.is_mutable
        if is_writing or any(argument.untyped_storage().data_ptr() not in memory for argument in arguments):
            self._spoil_given(arguments)
        if is_writing and func not in _CONSTANTS:
            self._made |= {owner for argument in arguments if (owner := self._owners.find(argument)) is not None}

    def _spoil_given(self, tensors: Sequence[Tensor]) -> None:
        self._spoil([found[0] for tensor in tensors if (found := self._given.find(tensor)) is not None])

    def _spoil(self, names: Iterable[str]) -> None:
        for name in names:
            self._noted[name].is_copied_alone = False


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]
