"""What is wrong with the fields of a plugin's config class: types that a recipe cannot hold, and defaults of another type.

Found before anything is converted, so that a class that nobody asks for stops no recipe. `rlcore.schema.structure` does the
converting, and takes all that passes here.
"""

import math
import typing
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, Literal

import attrs

from rlcore.registry.plugin_errors import is_outside
from rlcore.schema.describe import SCALARS
from rlcore.schema.types import innermost, is_array, is_attrs, is_mapping, is_union, origin, plain

SUPPORTED = "bool, int, float, str, Path, Literal, attrs classes, arrays and tables of these, and unions of these with None"


def field_problems(config: type) -> Iterator[str]:
    """All that is wrong with the fields of an attrs class, and of those nested in it."""
    problems = [problem for cls in _classes(config) for problem in _own_problems(cls)]
    yield from problems
    if not problems and all(field.default is not attrs.NOTHING for field in attrs.fields(config) if field.init):
        try:
            config()
        except BaseException as error:
            if is_outside(error):
                raise
            found = f"refuses its defaults: {type(error).__name__}: {error}"
            yield f"config class {config.__qualname__} {found}; expected defaults that it accepts, or required fields"


def _classes(config: type) -> Iterator[type]:
    """The class, and every attrs class that its fields name."""
    seen: list[type] = [config]
    for cls in seen:
        yield cls
        if not _unresolved(cls):
            named = [part for field in attrs.fields(cls) for part in innermost(field.type)]
            seen += [part for part in dict.fromkeys(named) if is_attrs(part) and part not in seen]


def _own_problems(cls: type) -> Iterator[str]:
    if reason := _unresolved(cls):
        yield f"the types of config class {cls.__qualname__} cannot be resolved: {reason}"
        return
    for field in attrs.fields(cls):
        if not field.init:
            continue
        where = f"{cls.__qualname__}.{field.name}"
        unsupported = [_shown(part) for part in innermost(field.type) if not _is_supported(part)]
        if unsupported:
            yield f"{where} is of type {', '.join(unsupported)}; expected {SUPPORTED}"
        elif not _is_fit(field):
            yield f"{where} has the default {_default(field)!r}; expected one of its type, {_shown(field.type)}"


def _unresolved(cls: type) -> str | None:
    """Why the annotations of a class name no types, or None where they do."""
    try:
        attrs.resolve_types(cls)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _is_supported(tp: Any) -> bool:
    if typing.get_origin(tp) is Literal:
        return all(isinstance(choice, bool | int | str) for choice in typing.get_args(tp))
    if is_mapping(tp):
        return all(plain(key) in (str, object, Any) for key in typing.get_args(tp)[:1])
    return tp in (*SCALARS, type(None), object, Any) or is_attrs(tp)


def _is_fit(field: "attrs.Attribute[Any]") -> bool:
    """Whether the default is of the field's type, as far as it is known without an object."""
    if field.default is attrs.NOTHING or field.converter is not None or getattr(field.default, "takes_self", False):
        return True
    try:
        return _fits(_default(field), field.type)
    except Exception:  # a factory that fails is told of where the class is built
        return True


def _default(field: "attrs.Attribute[Any]") -> Any:
    default: Any = field.default
    return default.factory() if isinstance(default, attrs.Factory) else default  # type: ignore[arg-type]


def _fits(value: Any, tp: Any) -> bool:
    tp, arguments = plain(tp), typing.get_args(plain(tp))
    if tp in (object, Any):
        return value is None or type(value) in SCALARS or isinstance(value, Path | Mapping | Sequence | AbstractSet)
    if tp is type(None):
        return value is None
    if is_union(tp):
        return any(_fits(value, branch) for branch in arguments)
    if typing.get_origin(tp) is Literal:
        return any(type(value) is type(choice) and value == choice for choice in arguments)
    if is_array(tp):
        branches = [argument for argument in arguments if argument is not Ellipsis] or [object]
        return isinstance(value, origin(tp)) and all(any(_fits(item, branch) for branch in branches) for item in value)
    if is_mapping(tp):
        return isinstance(value, Mapping) and all(_fits(item, arguments[1]) for item in value.values() if arguments)
    if tp is float:
        return type(value) in (int, float) and not math.isnan(value)
    return isinstance(value, tp) if tp is Path or is_attrs(tp) else type(value) is tp


def _shown(tp: Any) -> str:
    return "none given" if tp is None else tp.__qualname__ if isinstance(tp, type) and not typing.get_args(tp) else str(tp)
