"""Converts the recipe's tables for Megatron's own classes to the fields of these classes."""

import dataclasses
import enum
import inspect
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from attrs import evolve

from rlcore.schema.structure import structure
from rlcore.schema.suggestions import nearest
from rlcore.schema.types import is_union
from rlcore.spi import ConfigError, Problem

TABLES = ("transformer", "optimizer", "scheduler", "ddp")
"""The tables of `[trainer.megatron]`, in the order of `megatron_class`."""


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
    return {key: _converted(fields[key], value) for key, value in table.items()}


def table_problems(table: Mapping[str, Any], cls: type, path: str) -> Iterator[Problem]:
    """Keys that the class does not have, and values of a type that it does not take."""
    fields = fields_of(cls) if table else {}
    for key, value in table.items():
        if key not in fields:
            near = nearest(key, fields)
            remedy = f"Did you mean {near}?" if near else f"{cls.__module__} lists them"
            yield Problem(
                path=f"{path}.{key}", found="an unknown key", expected=f"a field of Megatron's {cls.__name__}", remedy=remedy
            )
        elif recipe_type(fields[key]) is None:
            expected = f"a field of Megatron's {cls.__name__} that a recipe can hold"
            remedy = "Leave it out: the trainer sets those that it needs"
            yield Problem(path=f"{path}.{key}", found="a field for a function or an object", expected=expected, remedy=remedy)
        else:
            for problem in structure(value, recipe_type(fields[key]), f"{path}.{key}")[1]:
                yield evolve(problem, expected=f"{problem.expected}, as Megatron's {cls.__name__} has it")


def recipe_type(annotation: Any) -> Any:
    """Return the type of a recipe's value for a field of this annotation: names for enums and dtypes. None where TOML has
    none."""
    if is_union(annotation):
        branches = [tp for option in get_args(annotation) if (tp := recipe_type(option)) is not None]
        return Union[tuple(branches)] if branches else None  # noqa: UP007  # the branches are known at run time
    if objects := _named_objects(annotation):
        return Literal[tuple(objects)]
    if get_origin(annotation) is list:
        item = recipe_type(*get_args(annotation))
        return None if item is None else list[item]
    return annotation if get_origin(annotation) in (Literal, tuple) or annotation in (bool, int, float, str, list) else None


def _converted(annotation: Any, value: Any) -> Any:
    """A value that `table_problems` found right, by the first alternative of the annotation that takes it."""
    if is_union(annotation):
        options = [option for option in get_args(annotation) if recipe_type(option) is not None]
        return _converted(next(option for option in options if not structure(value, recipe_type(option), "")[1]), value)
    if objects := _named_objects(annotation):
        return objects[value]
    if get_origin(annotation) is list:
        return [_converted(*get_args(annotation), item) for item in value]
    return structure(value, annotation, "")[0]


def _named_objects(annotation: Any) -> dict[str, Any]:
    """The values of a type that a recipe writes by name; none where it writes the values themselves."""
    import torch

    if isinstance(annotation, enum.EnumMeta):
        return dict(annotation.__members__)
    if annotation is not torch.dtype:
        return {}
    floats = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8)
    return {str(dtype).removeprefix("torch."): dtype for dtype in floats}
