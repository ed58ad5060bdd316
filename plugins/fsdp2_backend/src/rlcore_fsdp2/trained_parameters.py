"""The parameters that train, each with its settings by `[optimizer]` and with the matrices of the checkpoint that it holds.

Shapes: E experts of a stack, A rows and B columns of a matrix.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
from attrs import frozen
from torch import nn
from transformers.core_model_loading import revert_weight_conversion

from rlcore.spi import ConfigError, OptimizerSpec, Problem, ShardSlice
from rlcore_fsdp2.adapters import trained
from rlcore_fsdp2.export import Exported, exported_tensors
from rlcore_torchkit.adapters.lora_targets import is_adapter
from rlcore_torchkit.architectures.decoders import layers_of
from rlcore_torchkit.optimizer.settings import TensorSettings, group_problems, tensor_settings


@frozen(kw_only=True)
class Matrix:
    """A matrix of the checkpoint inside a parameter [A, B], or the same one of each expert inside a stack [E, A, B]."""

    rows: tuple[int, int]
    """First index, and one past the last, in the last dimension but one."""
    columns: tuple[int, int]
    """First index, and one past the last, in the last dimension."""
    shape: tuple[int, int]
    """(A, B) as the checkpoint has it, which may be transposed."""


@frozen(kw_only=True, eq=False)
class TrainedParameter:
    """One parameter that trains."""

    name: str
    parameter: nn.Parameter
    settings: TensorSettings
    matrices: tuple[Matrix, ...] = ()
    """Where Muon trains it: the matrices that cover it."""


def trained_parameters(model: Any, exported: Sequence[Exported], spec: OptimizerSpec) -> list[TrainedParameter]:
    """The parameters that train; `exported` is the Exporter's.

    ConfigError where a pattern of `spec.groups` matches nothing, where the tensors that one parameter holds have different
    settings, or where Muon's matrix is divided over several parameters.
    """
    names = {id(tensor): name for name, tensor in exported_tensors(model).items()}
    owners = {name: each for each in exported for name in each.parameters}
    parameters = {names.get(id(parameter), name): parameter for name, parameter in trained(model).items()}
    shapes = {name: _shapes(name, parameter, owners) for name, parameter in parameters.items()}
    problems = list(group_problems(spec, dict.fromkeys(key for held in shapes.values() for key in held)))
    in_layers = {id(parameter) for parameter in layers_of(model).parameters()}
    blocks = _Blocks(model)
    found = []
    for name, parameter in parameters.items():
        layered = id(parameter) in in_layers and not is_adapter(name)
        settings = {key: tensor_settings(spec, key, shape, in_layers=layered) for key, shape in shapes[name].items()}
        first = next(iter(settings.values()))
        is_divided = first.method == "muon" and len(owners[name].parameters) > 1
        if len(set(settings.values())) > 1 or is_divided:
            problems.append(_problem(name, shapes[name], is_divided=is_divided))
            continue
        matrices = blocks.matrices(name, parameter, shapes[name]) if first.method == "muon" else ()
        found.append(TrainedParameter(name=name, parameter=parameter, settings=first, matrices=matrices))
    if problems:
        raise ConfigError(problems)
    return found


def _shapes(name: str, parameter: nn.Parameter, owners: Mapping[str, Exported]) -> dict[str, tuple[int, ...]]:
    """Name and shape of each tensor that exports have of a parameter; of an adapter, and of a head of values, its own."""
    return dict(owners[name].shapes) if name in owners else {name: tuple(parameter.shape)}


def _problem(name: str, tensors: Mapping[str, Any], *, is_divided: bool) -> Problem:
    named = f"{', '.join(list(tensors)[:2])}{', …' if len(tensors) > 2 else ''}"
    if is_divided:
        found = f'"muon", and {named} lies in {name} and other parameters of the model\'s class'
        return Problem(path="optimizer.name", found=found, expected='"adamw", or a group with name = "adamw" that has it')
    found = f"different settings of {named}, which {name} holds together"
    return Problem(path="optimizer.groups", found=found, expected="patterns that match all of them or none")


class _Blocks:
    """Finds where transformers puts the tensors of a checkpoint that it fuses, once for the layers of a form."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._known: dict[object, tuple[Matrix, ...]] = {}

    def matrices(self, name: str, parameter: nn.Parameter, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Matrix, ...]:
        whole = tuple(parameter.shape)
        if len(shapes) == 1 and prod(next(iter(shapes.values()))) == prod(whole):
            rows, columns = next(iter(shapes.values()))[-2:]
            return (Matrix(rows=(0, whole[-2]), columns=(0, whole[-1]), shape=(rows, columns)),)
        key = whole, tuple(shapes.values()), name.rpartition(".")[2]
        if key not in self._known:
            self._known[key] = tuple(self._found(name, whole, shapes))
        return self._known[key]

    def _found(self, name: str, whole: tuple[int, ...], shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Matrix]:
        blocks = dict[str, ShardSlice]()
        for dim, size in enumerate(whole):
            index = torch.arange(size, dtype=torch.int32).view([-1 if dim == other else 1 for other in range(len(whole))])
            for key, part in revert_weight_conversion(self._model, {name: index.expand(whole)}).items():
                block = blocks.get(key, ShardSlice(key, (), ()))
                blocks[key] = ShardSlice(key, (*block.start, int(part.min())), (*block.stop, int(part.max()) + 1))
        number = whole[0] if len(whole) == 3 else 1
        parts = {(block.start[-2:], block.stop[-2:], shapes[key][-2:]) for key, block in blocks.items()}
        if sum(block.size for block in blocks.values()) != prod(whole) or len(parts) * number != len(blocks):
            raise ConfigError([_problem(name, shapes, is_divided=True)])
        for start, stop, (rows, columns) in sorted(parts):
            yield Matrix(rows=(start[0], stop[0]), columns=(start[1], stop[1]), shape=(rows, columns))
