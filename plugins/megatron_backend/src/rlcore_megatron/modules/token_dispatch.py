"""Frees tensors that Megatron's token dispatchers and TransformerEngine keep from one microbatch to the next."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

CONSTANTS = frozenset({"sort_input_by_local_experts", "restore_output_by_local_experts"})
"""Their tensors that no microbatch changes."""


def forget_tokens(models: Sequence[Any]) -> None:
    """Drop the tensors that dispatchers of experts keep until their next microbatch: routes, orders and probabilities.

    The probabilities hold on to the graph that made them. With recomputed layers that is each layer's input and its gradient,
    two tensors [tokens, hidden] a layer, which would be there while the optimizer steps and while a generator works.
    """
    for model in models:
        for module in model.modules():
            dispatcher = getattr(module, "token_dispatcher", None)
            # That of DeepEP keeps all of it in a part of its own.
            for keeper in (dispatcher, getattr(dispatcher, "_comm_manager", None)):
                _drop_tensors(keeper)


def _drop_tensors(keeper: object | None) -> None:
    for name, value in [] if keeper is None else list(vars(keeper).items()):
        if isinstance(value, Tensor) and name not in CONSTANTS:
            setattr(keeper, name, None)


def drop_float8_copies(models: Sequence[Any]) -> None:
    """Free the copies. The next pass makes them anew, as its first microbatch does in any case."""
    for model in models:
        for module in model.modules():
            if copies := getattr(module, "_fp8_workspaces", None):
                copies.clear()
