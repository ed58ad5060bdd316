"""The states that layers of transformers' classes hand from token to token, such as those of convolutions and linear attention.

Shapes: B sequences.
"""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

CACHE_NAMES = ("past_key_values", "cache_params")
"""Names under which classes take and return their caches."""


class _PassingAttention:
    """What is changed of a class of caches: attention keeps nothing in it, since its keys and values are kept elsewhere."""

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return key, value

    def get_seq_length(self, *_: Any) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, *_: Any) -> tuple[int, int]:
        return query_length, 0


def empty_cache(kind: type, config: Any) -> Any:
    """Return an empty cache of a class that transformers' model uses, in which attention keeps nothing."""
    from transformers import DynamicCache

    cache: Any = DynamicCache(config=config) if kind is DynamicCache else kind()
    cache.__class__ = type(kind.__name__, (_PassingAttention, kind), {})
    return cache


def layer_states(cache: Any, count: int) -> list[Tensor]:
    """[B, ...] the states in a cache of `count` sequences, which are its tensors, in the order of its attributes."""
    return [tensor for tensor in _tensors(vars(cache)) if tensor.ndim and len(tensor) == count]


def with_states(cache: Any, count: int, states: list[Tensor]) -> Any:
    """Return a copy of a cache of `count` sequences with these states in place of its own."""
    left = iter(states)
    copied = cache.__class__.__new__(cache.__class__)
    copied.__dict__.update(_mapped(vars(cache), lambda tensor: next(left) if tensor.ndim and len(tensor) == count else tensor))
    return copied


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part)
    elif _is_layer(value):
        yield from _tensors(vars(value))


def _mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: _mapped(part, function) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_mapped(part, function) for part in value)
    if _is_layer(value):
        copied = value.__class__.__new__(value.__class__)
        copied.__dict__.update(_mapped(vars(value), function))
        return copied
    return value


def _is_layer(value: Any) -> bool:
    from transformers import cache_utils

    return type(value).__module__ == cache_utils.__name__ and hasattr(value, "__dict__") and not isinstance(value, type)
