"""Optimizer steps of a part of the parameters at a time, where a step makes copies of all that it updates."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from rlcore_megatron.memory import STEP_ELEMENTS
from rlcore_megatron.optimizer_state import optimizers_of


def step_in_parts(optimizer: MegatronOptimizer, most_elements: int = STEP_ELEMENTS) -> None:
    """Have TransformerEngine's Adam step groups of at most so many elements, or of one parameter, one after another.

    For what it does not keep in float32 it makes float32 copies of a whole group before its kernel runs, and lets go of them
    before the next group's. Parameters do not depend on each other, so the step is the same, bit by bit.
    """
    for one in optimizers_of(optimizer):
        if _copies(one):
            one.step = partial(_step, one, one.step, most_elements)  # type: ignore[method-assign]


def _copies(optimizer: Any) -> bool:
    kept = getattr(optimizer, "name_to_dtype_map", {})
    return any(dtype != torch.float32 for dtype in kept.values())


def _step(optimizer: Any, step: Callable[..., Any], most_elements: int, *arguments: Any, **options: Any) -> Any:
    groups = optimizer.param_groups
    divided = [[{**group, "params": part} for part in _parts(group["params"], most_elements)] for group in groups]
    optimizer.param_groups = [part for parts in divided for part in parts]
    try:
        return step(*arguments, **options)
    finally:
        optimizer.param_groups = groups
        for group, parts in zip(groups, divided, strict=True):
            if parts:  # each part has counted the step of its group
                group.update({**parts[0], "params": group["params"]})


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
