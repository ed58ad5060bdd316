"""The recipe's tables for Megatron's own classes: which fields those have, and values as they want them."""

import dataclasses
import difflib
import enum
import inspect
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from rlcore.spi import ConfigError, Problem

TABLES = ("transformer", "optimizer", "scheduler", "ddp")
"""Those of `[trainer.megatron]`, in the order of `megatron_class`."""

_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", list: "a list"}
_PLURALS = {int: "whole numbers", float: "numbers", str: "texts"}


def megatron_class(table: str) -> type:
    """The class that a table is forwarded to. Imports Megatron, which takes seconds."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.transformer.transformer_config import TransformerConfig

    classes: tuple[type, ...] = (TransformerConfig, OptimizerConfig, OptimizerParamScheduler, DistributedDataParallelConfig)
    return dict(zip(TABLES, classes, strict=True))[table]


def fields_of(cls: type) -> dict[str, Any]:
    """Name to annotation of what the class is made from: a dataclass's fields, or the constructor's parameters."""
    if dataclasses.is_dataclass(cls):
        hints = get_type_hints(cls)
        return {field.name: hints[field.name] for field in dataclasses.fields(cls) if field.init}
    parameters = list(inspect.signature(cls).parameters.values())
    return {parameter.name: parameter.annotation for parameter in parameters if not isinstance(parameter.annotation, str)}


def converted(table: Mapping[str, Any], cls: type) -> dict[str, Any]:
    """A table's values as the class wants them: dtypes and enums by their names, tuples from lists.

    ConfigError for keys and values that `table_problems` reports.
    """
    if not table:
        return {}
    fields = fields_of(cls)
    problems = list(table_problems(table, cls, cls.__name__))
    if problems:
        raise ConfigError(problems)
    return {key: _convert(fields[key], value) for key, value in table.items()}


def table_problems(table: Mapping[str, Any], cls: type, path: str) -> Iterator[Problem]:
    """Keys that the class does not have, and values of a type that it does not take."""
    fields = fields_of(cls) if table else {}
    for key, value in table.items():
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1)
            remedy = f"Did you mean {near[0]}?" if near else f"{cls.__module__} lists them"
            yield Problem(
                path=f"{path}.{key}", found="an unknown key", expected=f"a field of Megatron's {cls.__name__}", remedy=remedy
            )
        elif not is_expressible(fields[key]):
            expected = f"a field of Megatron's {cls.__name__} that a recipe can hold"
            yield Problem(path=f"{path}.{key}", found="a field for a function or an object", expected=expected)
        elif not _accepts(fields[key], value):
            yield Problem(
                path=f"{path}.{key}",
                found=f"{value!r} ({type(value).__name__})",
                expected=f"{described(fields[key])}, as Megatron's {cls.__name__} has it",
            )


def is_expressible(annotation: Any) -> bool:
    """Whether TOML has values for it: it has none for functions and objects."""
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        return any(is_expressible(option) for option in get_args(annotation) if option is not type(None))
    return origin in (Literal, list, tuple) or annotation in (bool, int, float, str, list) or _is_named(annotation)


def described(annotation: Any) -> str:
    """What to write, in words."""
    origin, options = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return " or ".join(described(option) for option in options if is_expressible(option))
    if origin is tuple:
        return f"a list of {len(options)} of {', '.join(_PLURALS[option] for option in options)}"
    if origin is list:
        return f"a list of {_PLURALS.get(options[0], described(options[0]))}"
    if origin is Literal or _is_named(annotation):
        return f"one of {', '.join(map(repr, options or _names(annotation)))}"
    return _WORDS[annotation]


def _accepts(annotation: Any, value: Any) -> bool:
    origin, options = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return any(_accepts(option, value) for option in options)
    if origin is Literal:
        return any(type(value) is type(option) and value == option for option in options)
    if origin is tuple:
        return _is_list(value) and len(value) == len(options) and all(map(_accepts, options, value))
    if origin is list or annotation is list:
        return _is_list(value) and all(_accepts(option, element) for option in options for element in value)
    if _is_named(annotation):
        return isinstance(value, str) and value in _names(annotation)
    if annotation is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return annotation in (bool, int, str) and type(value) is annotation


def _convert(annotation: Any, value: Any) -> Any:
    origin, options = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return _convert(next(option for option in options if _accepts(option, value)), value)
    if origin is tuple:
        return tuple(map(_convert, options, value))
    if origin is list:
        return [_convert(options[0], element) for element in value]
    if _is_named(annotation):
        return annotation[value] if isinstance(annotation, enum.EnumMeta) else _dtypes()[value]
    return float(value) if annotation is float else value


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _is_named(annotation: Any) -> bool:
    """Whether its values are written by name."""
    import torch

    return isinstance(annotation, enum.EnumMeta) or annotation is torch.dtype


def _names(annotation: Any) -> list[str]:
    return list(annotation.__members__) if isinstance(annotation, enum.EnumMeta) else sorted(_dtypes())


def _dtypes() -> dict[str, Any]:
    import torch

    floats = (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2)
    return {str(dtype).removeprefix("torch."): dtype for dtype in floats}
