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
from rlcore_torchkit.optimizer.settings import TensorSettings, effect_problems, group_problems, is_flat_stack, tensor_settings

_NO_MUON = '"adamw", or a group with name = "adamw" that has it'


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
    """The matrices that cover a parameter of Muon's; none of AdamW's."""


@frozen(kw_only=True, eq=False)
class _Held:
    """A parameter that trains, with the tensors of exports that it holds."""

    parameter: nn.Parameter
    shapes: Mapping[str, tuple[int, ...]]
    """Name to shape of each tensor; of an adapter, and of a head of values, its own."""
    in_layers: bool
    """True for a weight of one of the decoder's layers."""
    is_divided: bool
    """True where other parameters hold parts of the same tensors."""

    def settings(self, spec: OptimizerSpec) -> dict[str, TensorSettings]:
        """The settings of each tensor."""
        return {key: tensor_settings(spec, key, shape, in_layers=self.in_layers) for key, shape in self.shapes.items()}


def trained_parameters(model: Any, exported: Sequence[Exported], spec: OptimizerSpec) -> list[TrainedParameter]:
    """The parameters that train; `exported` is the Exporter's. ConfigError with `settings_problems`."""
    held = _held(model, exported)
    problems = list(_problems(held, spec, "optimizer"))
    if problems:
        raise ConfigError(problems)
    blocks = _Blocks(model)
    found = []
    for name, each in held.items():
        settings = next(iter(each.settings(spec).values()))
        matrices = blocks.matrices(name, each.parameter, each.shapes) if settings.method == "muon" else ()
        found.append(TrainedParameter(name=name, parameter=each.parameter, settings=settings, matrices=matrices))
    return found


def settings_problems(model: Any, exported: Sequence[Exported], spec: OptimizerSpec, section: str) -> Iterator[Problem]:
    """Refuse patterns that match nothing, keys of groups without effect, different settings of tensors that one parameter
    holds, and Muon where a tensor is divided over several parameters, or holds all experts' matrices as one."""
    yield from _problems(_held(model, exported), spec, section)


def _held(model: Any, exported: Sequence[Exported]) -> dict[str, _Held]:
    names = {id(tensor): name for name, tensor in exported_tensors(model).items()}
    owners = {name: each for each in exported for name in each.parameters}
    parameters = {names.get(id(parameter), name): parameter for name, parameter in trained(model).items()}
    in_layers = {id(parameter) for parameter in layers_of(model).parameters()}
    return {
        name: _Held(
            parameter=parameter,
            shapes=owners[name].shapes if name in owners else {name: tuple(parameter.shape)},
            in_layers=id(parameter) in in_layers and not is_adapter(name),
            is_divided=name in owners and len(owners[name].parameters) > 1,
        )
        for name, parameter in parameters.items()
    }


def _problems(held: Mapping[str, _Held], spec: OptimizerSpec, section: str) -> Iterator[Problem]:
    tensors = {key: (shape, each.in_layers) for each in held.values() for key, shape in each.shapes.items()}
    yield from group_problems(spec, tensors, section)
    yield from effect_problems(spec, tensors, section)
    for name, each in held.items():
        found = set(each.settings(spec).values())
        is_muon = any(settings.method == "muon" for settings in found)
        if len(found) > 1 or (is_muon and each.is_divided):
            yield _problem(name, each.shapes, section, is_divided=is_muon and each.is_divided)
        for key, shape in each.shapes.items():
            if is_muon and is_flat_stack(key, shape):
                held_as_one = f'"muon", and {key} has the matrices of all experts as rows of one'
                yield Problem(path=f"{section}.name", found=held_as_one, expected=_NO_MUON)


def _problem(name: str, tensors: Mapping[str, Any], section: str, *, is_divided: bool) -> Problem:
    named = f"{', '.join(list(tensors)[:2])}{', …' if len(tensors) > 2 else ''}"
    if is_divided:
        found = f'"muon", and {named} lies in {name} and other parameters of the model\'s class'
        return Problem(path=f"{section}.name", found=found, expected=_NO_MUON)
    found = f"different settings of {named}, which {name} holds together"
    return Problem(path=f"{section}.groups", found=found, expected="patterns that match all of them or none")


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
            raise ConfigError([_problem(name, shapes, "optimizer", is_divided=True)])
        for start, stop, (rows, columns) in sorted(parts):
            yield Matrix(rows=(start[0], stop[0]), columns=(start[1], stop[1]), shape=(rows, columns))
