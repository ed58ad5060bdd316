"""Optimizer steps of a part of the parameters at a time, where a step makes copies of all that it updates."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from rlcore_megatron.layouts.optimizer_memory import STEP_ELEMENTS
from rlcore_megatron.training.masters import MASTER
from rlcore_megatron.training.optimizer_state import MOMENTS, optimizers_of


def step_in_parts(optimizer: MegatronOptimizer, most_elements: int = STEP_ELEMENTS) -> None:
    """Have TransformerEngine's Adam step groups of at most so many elements, or of one parameter, one after another.

    For what it does not keep in float32 it makes float32 copies of a whole group before its kernel runs, and writes them back
    behind it, a tensor at a time. Copies of bfloat16 take a few kernels for a part here: the tensors of experts are thousands.
    Parameters do not depend on each other, so the step is the same, bit by bit.
    """
    for one in optimizers_of(optimizer):
        if _copies(one):
            one.step = partial(_step, one, one.step, most_elements)  # type: ignore[method-assign]


def _copies(optimizer: Any) -> bool:
    kept = getattr(optimizer, "name_to_dtype_map", {})
    return any(dtype != torch.float32 for dtype in kept.values())


def _step(optimizer: Any, step: Callable[[], Any], most_elements: int) -> None:
    groups = optimizer.param_groups
    divided = [[{**group, "params": part} for part in _parts(group["params"], most_elements)] for group in groups]
    try:
        for part in [part for parts in divided for part in parts]:
            optimizer.param_groups = [part]
            with _copied_at_once(optimizer, part["params"]):
                step()
    finally:
        optimizer.param_groups = groups
        for group, parts in zip(groups, divided, strict=True):
            if parts:  # each part has counted the step of its group
                group.update({**parts[0], "params": group["params"]})


@contextmanager
def _copied_at_once(optimizer: Any, parameters: Sequence[Tensor]) -> Iterator[None]:
    """Have a step find the float32 copies of what is kept in bfloat16, made by one call, and write them back by one."""
    names = [name for name in (*MOMENTS, MASTER) if optimizer.name_to_dtype_map.get(name) == torch.bfloat16]
    states = [(id(parameter), optimizer.state.get(parameter, {})) for parameter in parameters]
    kept = {(key, name): state[name] for key, state in states for name in names if name in state}
    if not kept:  # the first step makes it
        yield
        return
    narrow = list(kept.values())
    wide = [torch.empty_like(one, dtype=torch.float32) for one in narrow]
    torch._foreach_copy_(wide, narrow)
    copies, written_below = dict(zip(kept, wide, strict=True)), {id(one) for one in narrow}
    read, write = optimizer.get_unscaled_state, optimizer._apply_scale

    def find(parameter: Tensor, name: str) -> Tensor:
        copy = copies.get((id(parameter), name))
        return read(parameter, name) if copy is None else copy

    def write_others(name: str, copy: Tensor, narrow: Tensor, scale: Tensor) -> None:
        if id(narrow) not in written_below:
            write(name, copy, narrow, scale)

    optimizer.get_unscaled_state, optimizer._apply_scale = find, write_others
    try:
        yield
        torch._foreach_copy_(narrow, wide)
    finally:
        del optimizer.get_unscaled_state, optimizer._apply_scale


def _parts(parameters: Sequence[Tensor], most_elements: int) -> list[list[Tensor]]:
    parts: list[list[Tensor]] = []
    size = 0
    for parameter in parameters:
        if not parts or size + parameter.numel() > most_elements:
            parts.append([])
            size = 0
        parts[-1].append(parameter)
        size += parameter.numel()
    return parts
