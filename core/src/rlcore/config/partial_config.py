"""What can be kept of a broken section, so that the rest of the recipe can be checked in the same pass.

Without it a recipe with one wrong type would show its impossible combinations only once that type has been corrected.
"""

import typing
from collections.abc import Mapping
from typing import Any

import attrs

from rlcore.schema import describe
from rlcore.schema.structure import structure


def salvage(table: object, tp: Any) -> Any:
    """The section with every key that cannot be used left out, and stand-ins for required ones. Its type is an attrs class, or
    one or nothing."""
    (cls,) = _classes(tp)[:1]
    written = table if isinstance(table, Mapping) else {}
    kept: dict[str, Any] = {}
    for name, attribute in describe.fields(cls).items():
        if name in written:
            kept |= _salvage_key(name, written[name], attribute.type)
        if name not in kept and attribute.default is attrs.NOTHING:
            kept[name] = stand_in(attribute.type)
    return cls(**kept)


def _salvage_key(name: str, value: object, tp: Any) -> dict[str, Any]:
    """{name: value}, or nothing where the value is of a wrong type."""
    nested = _classes(tp)
    if nested and isinstance(value, Mapping):
        return {name: salvage(value, nested[0])}
    holder = attrs.make_class("Holder", {name: attrs.field(type=tp)})
    held, problems = structure({name: value}, holder, "")
    return {} if problems else {name: getattr(held, name)}


def _classes(tp: Any) -> list[Any]:
    """The attrs classes among a type's alternatives."""
    return [branch for branch in (*typing.get_args(tp), tp) if isinstance(branch, type) and attrs.has(branch)]


def stand_in(tp: Any) -> Any:
    """Some value of the type, for a required key that is missing."""
    return salvage({}, tp) if attrs.has(tp) else tp()
