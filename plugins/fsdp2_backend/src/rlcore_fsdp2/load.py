"""The weights of a model that is divided over ranks: each rank reads its own parts of the files and nothing else of them.

Of ranks that hold the same part one reads it, and sends it to the others.
"""

import re
from collections.abc import Iterator, Mapping, Set
from contextlib import ExitStack
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from rlcore.spi import ContractError, ModelSpec, Problem, ShardSlice
from rlcore.spi.weights import VALUE_HEAD_WEIGHT
from rlcore_fsdp2.sharding import bounds_of, held_part, is_first_copy, local, send_copies
from rlcore_torchkit.adapters.lora_targets import is_adapter
from rlcore_torchkit.architectures.modules import ModuleNames
from rlcore_torchkit.distributed.agreement import together
from rlcore_torchkit.head.values import has_value_head
from rlcore_torchkit.huggingface.models import architecture_of, may_lack_value_head
from rlcore_torchkit.huggingface.safetensors_files import TensorFiles, open_tensors

_EXPERTS = re.compile(r"(.+)\.(gate_up_proj|down_proj)")


@torch.no_grad()
def load_parts(model: Any, spec: ModelSpec, device: torch.device, *, parameters_on: torch.device) -> None:
    """Load the values of a causal language model, or one with a head of values, which is on device "meta" and divided. A
    collective.

    Parameters keep their dtype and go to `parameters_on`, buffers to `device`; adapters are left without values. ModelError,
    the same on every rank, where a rank cannot read a file, and where tensors of the architecture are missing or have another
    shape.
    """
    modules = architecture_of(model.config).modules
    is_tied = _allocate(model, modules, device, parameters_on)
    parameters = {name: parameter for name, parameter in model.named_parameters() if not is_adapter(name)}
    with ExitStack() as stack:
        files = together(lambda: stack.enter_context(open_tensors(spec)))
        if VALUE_HEAD_WEIGHT not in files and may_lack_value_head(model.config) and VALUE_HEAD_WEIGHT in parameters:
            local(parameters.pop(VALUE_HEAD_WEIGHT)).zero_()
        copied = {f"{modules.head}.weight"}  # a tied one, which `_check_tied` compares; a model of values does without
        together(lambda: _fill_all(parameters, modules, files, copied, model.config.to_dict()))
        send_copies(parameters.values())
        if is_tied:
            together(lambda: _check_tied(parameters, f"{modules.embedding}.weight", f"{modules.head}.weight", files))


def _allocate(model: Any, modules: ModuleNames, device: torch.device, parameters_on: torch.device) -> bool:
    """Allocate this rank's parts, and buffers with their values; returns whether the head's weight is the embedding's."""
    others = [name for name, _ in model.named_buffers() if not name.startswith(f"{modules.rotary}.")]
    if others:
        raise ContractError(f"found the buffer {others[0]}; expected those of rotary embeddings alone")
    embedding = model.get_submodule(modules.embedding)
    head = model.score if has_value_head(model) else model.get_submodule(modules.head)
    is_tied = head._parameters["weight"] is embedding._parameters["weight"]
    model.to_empty(device=parameters_on)
    if is_tied:  # what to_empty has put into the one module is not what it has put into the other
        head.register_parameter("weight", embedding._parameters["weight"])
    rotary = type(model.get_submodule(modules.rotary))(config=model.config)
    model.set_submodule(modules.rotary, rotary.to(device))
    return is_tied


@frozen(kw_only=True)
class _FileTensor:
    """A tensor of the files, and where in a parameter it belongs."""

    name: str
    shape: tuple[int, ...]
    block: ShardSlice
    """The block of the parameter that it fills: the tensor's shape, after dimensions of 1 where the parameter has more."""


def _fill_all(
    parameters: Mapping[str, Tensor], modules: ModuleNames, files: TensorFiles, copied: Set[str], config: Mapping[str, Any]
) -> None:
    """Copy what this rank reads of all parameters, once all are known to be there."""
    tensors = {
        name: list(_file_tensors(name, tuple(parameter.shape), modules, files)) for name, parameter in parameters.items()
    }
    files.raise_problems([problem for each in tensors.values() for tensor in each for problem in _problems(tensor, files)])
    files.raise_unknown({tensor.name for each in tensors.values() for tensor in each} | copied, config)
    for name, parameter in parameters.items():
        for tensor in tensors[name] if is_first_copy(parameter) else ():
            _fill(parameter, tensor, files)


def _file_tensors(name: str, shape: tuple[int, ...], modules: ModuleNames, files: TensorFiles) -> Iterator[_FileTensor]:
    """Return the tensors of a parameter of this global shape: one of its own name, or those of a layer's experts."""
    bare = name.removeprefix("model.")  # as a decoder is saved without its head
    match = _EXPERTS.fullmatch(name)
    if match is None or name in files:
        found = bare if bare in files and name not in files else name
        yield _FileTensor(name=found, shape=shape, block=ShardSlice(found, (0,) * len(shape), shape))
        return
    prefix, kind = match.groups()
    projections = (modules.gate, modules.up) if kind == "gate_up_proj" else (modules.down,)
    num_experts, rows, columns = shape
    size = rows // len(projections)
    for expert in range(num_experts):
        for number, projection in enumerate(projections):
            found = f"{prefix}.{expert}.{projection}.weight"
            block = ShardSlice(found, (expert, number * size, 0), (expert + 1, (number + 1) * size, columns))
            yield _FileTensor(name=found, shape=(size, columns), block=block)


def _problems(tensor: _FileTensor, files: TensorFiles) -> Iterator[Problem]:
    if tensor.name not in files:
        yield files.problem(f"no {tensor.name} in the weights", "every tensor of the architecture")
    elif files.shape(tensor.name) != tensor.shape:
        found = f"{tensor.name} of shape {list(files.shape(tensor.name))}"
        yield files.problem(found, f"{list(tensor.shape)}, as config.json says")


def _fill(parameter: Tensor, tensor: _FileTensor, files: TensorFiles) -> None:
    held = held_part(tensor.name, parameter)
    part = held.common(tensor.block)
    if part.size:
        bounds = part.within(tensor.block)[-len(tensor.shape) :]
        local(parameter)[part.within(held)].copy_(files.read(tensor.name, bounds, parameter.dtype))


def _check_tied(parameters: Mapping[str, Tensor], embedding: str, head: str, files: TensorFiles) -> None:
    """ModelError where the files have a head of its own for a model whose head is said to be its embedding."""
    weight = parameters[embedding]
    part = held_part(embedding, weight)
    if head not in files or not part.size:
        return
    if not torch.equal(files.read(head, bounds_of(part), weight.dtype).to(local(weight)), local(weight)):
        found = f"{head} that is not {embedding}"
        files.raise_problems([files.problem(found, "one tensor, or tie_word_embeddings = false in config.json")])
