"""Inspect the types of configuration fields: unions, arrays, tables, and the types inside them."""

import functools
import math
import operator
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from numbers import Real
from typing import Any, TypeVar, Union

import attrs

from rlcore.schema.constraints import Constraint


def plain(tp: Any) -> Any:
    """Return a type without Annotated, NewType and `type X = ...` around it."""
    while True:
        if typing.get_origin(tp) is typing.Annotated:
            tp = typing.get_args(tp)[0]
        elif isinstance(tp, typing.NewType):
            tp = tp.__supertype__
        elif type(tp).__name__ == "TypeAliasType":  # which Python 3.11 has not
            tp = tp.__value__
        else:
            return tp


def constraints(tp: Any) -> tuple[Constraint, ...]:
    """Return the constraints in a type's Annotated metadata."""
    found = typing.get_args(tp)[1:] if typing.get_origin(tp) is typing.Annotated else ()
    return tuple(condition for condition in found if isinstance(condition, Constraint))


MarkT = TypeVar("MarkT")


def marks(tp: Any, kind: type[MarkT]) -> Iterator[MarkT]:
    """Yield the Annotated metadata of a class from a type, its alternatives and its items."""
    if typing.get_origin(tp) is typing.Annotated:
        yield from (mark for mark in typing.get_args(tp)[1:] if isinstance(mark, kind))
        tp = plain(tp)
    if is_union(tp) or is_array(tp):
        for argument in typing.get_args(tp):
            yield from marks(argument, kind)


def is_number(value: object) -> bool:
    """Return whether a value is a finite number; numpy's numbers count."""
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an int beyond all floats
        return False


def is_constrained(tp: object) -> bool:
    """Return whether conditions are written beside the type."""
    return bool(constraints(tp))


def origin(tp: Any) -> Any:
    """The class of a generic type, such as tuple of tuple[int, ...]; any other type itself."""
    return typing.get_origin(tp) or tp


def is_optional(tp: object) -> bool:
    """Return whether None is among the type's alternatives."""
    return is_union(tp) and type(None) in typing.get_args(tp)


def is_union(tp: object) -> bool:
    """Return whether the type is `A | B`."""
    return typing.get_origin(tp) in (Union, types.UnionType)


def alternatives(tp: object) -> list[Any]:
    """The types of a union but for None, which a recipe cannot write; of any other type, none."""
    return [branch for branch in typing.get_args(tp) if branch is not type(None)] if is_union(tp) else []


def is_choice(value: object, choices: Iterable[object]) -> bool:
    """Return whether a value is one of `choices`, among which True is not 1."""
    return any(type(value) is type(choice) and value == choice for choice in choices)


def is_mapping(tp: object) -> bool:
    """Return whether the type is a mapping, for which a recipe writes a table."""
    cls = origin(tp)
    return isinstance(cls, type) and issubclass(cls, Mapping)


def is_array(tp: object) -> bool:
    """Return whether the type is a tuple, list, set or sequence, for which a recipe writes an array."""
    cls = origin(tp)
    return isinstance(cls, type) and issubclass(cls, Sequence | AbstractSet) and not issubclass(cls, str | bytes)


def is_attrs(tp: object) -> bool:
    """Return whether the type is an attrs class."""
    return isinstance(tp, type) and attrs.has(tp)


def table_class(tp: object) -> Any:
    """The attrs class that a type is, or is optionally; None where it is neither."""
    return next((branch for branch in (*alternatives(tp), tp) if is_attrs(branch)), None)


def is_table(tp: object) -> bool:
    """Return whether a recipe writes a table for the type."""
    return is_mapping(tp) or is_attrs(tp)


def item_type(tp: object) -> object:
    """Return the type of an array's items; the items of a tuple such as (float, float) are of all its types."""
    arguments = [argument for argument in typing.get_args(tp) if argument is not Ellipsis]
    return functools.reduce(operator.or_, arguments) if arguments else object


def innermost(tp: Any) -> Iterator[Any]:
    """The types that a type is made of: the alternatives of unions, the items of arrays, each mapping and its values."""
    tp = plain(tp)
    if is_union(tp) or is_array(tp):
        for argument in typing.get_args(tp):
            if argument is not Ellipsis:
                yield from innermost(argument)
        return
    yield tp
    if is_mapping(tp):
        yield from (part for item in typing.get_args(tp)[1:] for part in innermost(item))
