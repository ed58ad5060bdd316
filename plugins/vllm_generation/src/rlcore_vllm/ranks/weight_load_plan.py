"""Records the copies that a model's weight loaders make at the first load, and repeats them without the loaders.

vLLM calls a function for each tensor of a checkpoint, which looks for the name, cuts this rank's part out and copies it. Of a
mixture of experts with its tens of thousands of tensors the calls cost far more than the copies. Where parameters stay as they
were loaded, each refit makes the same copies, so all tensors of a bucket are copied in one call.

A loader that does anything else with a tensor than to copy parts of it is called each time.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import compress
from math import prod
from operator import is_
from typing import Any

import torch
from attrs import field, frozen, mutable
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlcore.spi import ShardSlice, TensorSpec
from rlcore_torchkit.refit.shard_slices import joined
from rlcore_vllm.engines.versions import without_weights

Weights = Sequence[tuple[str, Tensor]]
LoadWeights = Callable[[Iterator[tuple[str, Tensor]]], set[str] | None]


@frozen(kw_only=True, eq=False)
class Copy:
    """A part of a tensor that a loader copied."""

    destination: Tensor
    """A view of the parameter."""
    stride: tuple[int, ...]
    offset: int
    """Elements of the tensor before the part's first."""
    is_all: bool
    """True where the part is the tensor itself."""
    is_flat: bool
    """True where part and destination are contiguous."""

    def of(self, tensor: Tensor) -> Tensor:
        """The part, of another contiguous tensor of the noted shape."""
        if self.is_all:
            return tensor
        return tensor.as_strided(self.destination.shape, self.stride, tensor.storage_offset() + self.offset)

    def region(self, name: str, shape: torch.Size) -> ShardSlice:
        """Return the place of the part in a contiguous tensor of this shape: exactly, if it is a slice of it in each dimension;
        else the rows that it has elements of."""
        steps = [(size - 1, stride) for size, stride in zip(self.destination.shape, self.stride, strict=True) if size > 1]
        start = _index(self.offset, shape)
        stop = _index(self.offset + sum(count * stride for count, stride in steps), shape)
        if not _stays_in_dimensions(steps, start, shape):
            start, stop = (start[0], *(0 for _ in shape[1:])), (stop[0], *(extent - 1 for extent in shape[1:]))
        return ShardSlice(name, start, tuple(last + 1 for last in stop))


@mutable(kw_only=True, eq=False)
class Noted:
    """The record of one tensor's load."""

    shape: torch.Size
    dtype: torch.dtype
    copies: list[Copy] = field(factory=list)
    parameters: set[str] = field(factory=set)
    """The parameters that something was copied to."""
    is_copied_alone: bool = True
    """True where a loader has done nothing else with it."""
    _needed: list[ShardSlice] | None = None

    def needed(self, name: str) -> list[ShardSlice]:
        """The parts that are copied, of which no two have an element in common."""
        if self._needed is None:
            self._needed = joined(copy.region(name, self.shape) for copy in self.copies if copy.destination.numel())
        return self._needed


@frozen(kw_only=True, eq=False)
class _Plan:
    """All copies of tensors of these names, in one order; kept, since buckets are cut as in the load before."""

    noted: list[Noted]
    parameters: frozenset[str]
    shapes: list[torch.Size]
    dtypes: list[torch.dtype]
    calls: list[tuple[list[Tensor], list[tuple[int, Copy]]]]
    """The copies of one call: destinations, and of each the number of the tensor and the part of it."""

    @classmethod
    def of(cls, noted: list[Noted]) -> "_Plan":
        calls: dict[tuple[Any, ...], tuple[list[Tensor], list[tuple[int, Copy]]]] = defaultdict(lambda: ([], []))
        for number, each in enumerate(noted):
            for copy in each.copies:
                # One call copies many at once only where none of them is strided or cast.
                destinations, parts = calls[copy.is_flat, copy.destination.dtype, each.dtype]
                destinations.append(copy.destination)
                parts.append((number, copy))
        return cls(
            noted=noted,
            parameters=frozenset().union(*(each.parameters for each in noted)),
            shapes=[each.shape for each in noted],
            dtypes=[each.dtype for each in noted],
            calls=list(calls.values()),
        )

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether these are of the shapes and dtypes that were noted, and lie as they did."""
        return (
            [tensor.shape for tensor in tensors] == self.shapes
            and [tensor.dtype for tensor in tensors] == self.dtypes
            and all(tensor.is_contiguous() for tensor in tensors)
        )

    def carry_out(self, tensors: Sequence[Tensor]) -> None:
        for destinations, parts in self.calls:
            sources = [tensors[number] if copy.is_all else copy.of(tensors[number]) for number, copy in parts]
            torch._foreach_copy_(destinations, sources)


class WeightLoadPlan:
    """The record of one model's loads."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._noted: dict[str, Noted] = {}
        self._made: set[str] = set()
        """Parameters to which loaders wrote what was no tensor's part, or that they read."""
        self._reported: set[str] | None = set()
        """Parameters that loaders report without a copy, such as a head's on a rank without rows; None where they report
        nothing."""
        self._plans: dict[tuple[str, ...], _Plan] = {}
        self._earlier_plans: dict[tuple[str, ...], _Plan] = {}
        """By the names in a bucket, from the load before; `_plans` are from this load. Older ones are dropped."""
        self._addresses: dict[str, int] = {}
        self._is_fixed = not any(_moves_experts(layer) for layer in model.modules())

    def begin(self) -> None:
        """A load begins: forget what was noted where a parameter has another memory than then."""
        addresses = {name: tensor.data_ptr() for name, tensor in self._model.named_parameters()}
        self._plans, self._earlier_plans = {}, self._plans
        if addresses != self._addresses:
            self._earlier_plans = {}
            self._noted, self._made, self._reported, self._addresses = {}, set(), set(), addresses

    def know(self, name: str, tensor: Tensor) -> bool:
        """Return whether this tensor can be loaded without the loaders."""
        return self._known(name, tensor.shape, tensor.dtype) is not None and tensor.is_contiguous()

    def needs(self, specs: Iterable[TensorSpec]) -> dict[str, list[ShardSlice]]:
        """Return the copied parts of each tensor that the plan can load, maybe none; of others, which have no key, the whole is
        needed."""
        found = dict[str, list[ShardSlice]]()
        for spec in specs:
            noted = self._known(spec.name, torch.Size(spec.shape), getattr(torch, spec.dtype))
            # Of a parameter that gets no element of it is reported that it was loaded, where the tensor comes.
            if noted is not None and (noted.needed(spec.name) or not noted.parameters):
                found[spec.name] = noted.needed(spec.name)
        return found

    def load(self, weights: Weights, load_weights: LoadWeights) -> set[str] | None:
        """Copy by the plan, and let the model's loaders load the rest, which extends the plan. Returns the names of the
        parameters that have got something, or None where the loaders report none."""
        names: set[str] | None
        names, others = self._load_known(weights)
        if others:
            reported = self._load_watched(others, load_weights)
            names = None if names is None or reported is None else names | reported
        return None if names is None or self._reported is None else names | self._reported

    def _known(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Noted | None:
        noted = self._noted.get(name)
        if noted is None or not noted.is_copied_alone or (noted.shape, noted.dtype) != (shape, dtype):
            return None
        return noted if self._made.isdisjoint(noted.parameters) else None

    def _load_known(self, weights: Weights) -> tuple[set[str], Weights]:
        """Copy tensors that are known; returns the names of the parameters to which something was copied, and the others."""
        names, tensors = tuple(name for name, _ in weights), [tensor for _, tensor in weights]
        plan = self._plan_of(names)
        others: list[tuple[str, Tensor]] = []
        if plan is None or not plan.fits(tensors):
            known = [self.know(name, tensor) for name, tensor in weights]
            others = [pair for pair, is_known in zip(weights, known, strict=True) if not is_known]
            tensors = list(compress(tensors, known))
            plan = _Plan.of([self._noted[name] for name in compress(names, known)])
            if not others:
                self._plans[names] = plan
        plan.carry_out(tensors)
        return set(plan.parameters), others

    def _plan_of(self, names: tuple[str, ...]) -> _Plan | None:
        """Return the plan of the load before, if it still is what has been noted of these names last."""
        plan = self._earlier_plans.get(names)
        if plan is None or not self._made.isdisjoint(plan.parameters):
            return None
        if not all(map(is_, map(self._noted.get, names), plan.noted)):
            return None
        self._plans[names] = plan
        return plan

    def _load_watched(self, weights: Weights, load_weights: LoadWeights) -> set[str] | None:
        """Run the model's loaders, and note what they do; returns their answer."""
        given = _Given(weights)
        if not self._is_fixed or not given.lie_apart:
            return load_weights(iter(weights))
        noted = {
            name: Noted(shape=tensor.shape, dtype=tensor.dtype, is_copied_alone=tensor.is_contiguous())
            for name, tensor in weights
        }
        with _Watch(given, _Owners(self._model), noted, self._made):
            reported = load_weights(iter(weights))
        self._noted |= noted
        if reported is None or self._reported is None:
            self._reported = None
            return None
        named = {name for name, _ in self._model.named_parameters()}
        got_something = named - without_weights(named, reported)
        self._reported |= got_something.difference(*(each.parameters for each in noted.values()))
        return reported


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
    """Finds the parameter that a view is of; none of a buffer, which models put others in the place of as they run."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {tensor.untyped_storage().data_ptr(): name for name, tensor in model.named_parameters()}

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
            self._make([destination, source])
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
        """Views are watched themselves; what else reads a tensor, or reads or writes the model, is to be done each time."""
        memory = {result.untyped_storage().data_ptr() for result in results}
        if func._schema.is_mutable or any(argument.untyped_storage().data_ptr() not in memory for argument in arguments):
            self._spoil_given(arguments)
            self._make(arguments)

    def _make(self, tensors: Sequence[Tensor]) -> None:
        """Mark the parameters that loaders read or fill with constants: a plan cannot restore these after a sleep that discards
        weights."""
        self._made |= {owner for tensor in tensors if tensor.numel() and (owner := self._owners.find(tensor)) is not None}

    def _spoil_given(self, tensors: Sequence[Tensor]) -> None:
        self._spoil([found[0] for tensor in tensors if (found := self._given.find(tensor)) is not None])

    def _spoil(self, names: Iterable[str]) -> None:
        for name in names:
            self._noted[name].is_copied_alone = False


def _moves_experts(layer: nn.Module) -> bool:
    """Return whether vLLM moves a layer's experts between ranks to balance their load: they are elsewhere at the next refit.
    Some models say so themselves; of the others the layer of the experts' weights does."""
    config: Any = getattr(layer, "moe_config", None)
    parallel = getattr(config, "moe_parallel_config", None)
    return bool(getattr(layer, "enable_eplb", False) or getattr(parallel, "enable_eplb", False))


def _index(offset: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the index of the element that so many others lie before."""
    found = []
    for extent in reversed(shape):
        found.append(offset % extent)
        offset //= extent
    return tuple(reversed(found))


def _stays_in_dimensions(steps: Iterable[tuple[int, int]], start: Sequence[int], shape: Sequence[int]) -> bool:
    """Return whether a view that begins at `start` goes on, in each dimension of its own, within one of the tensor's. `steps`
    are how often it does and by how many elements."""
    reached, strides = list(start), [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    for count, stride in steps:
        if stride == 0:
            continue
        dim = next(dim for dim, own in enumerate(strides) if own <= stride and (shape[dim] > 1 or own == 1))
        if stride % strides[dim]:
            return False
        reached[dim] += count * (stride // strides[dim])
    return all(place < extent for place, extent in zip(reached, shape, strict=True))


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]
