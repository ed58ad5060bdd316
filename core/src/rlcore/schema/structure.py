"""The strict cattrs converter: exact types, no unknown keys, and every failure told as a Problem with its path."""

import functools
import math
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs
from attrs import define
from cattrs import ClassValidationError, Converter, ForbiddenExtraKeysError, IterableValidationError
from cattrs.cols import list_structure_factory, mapping_structure_factory
from cattrs.gen import make_dict_structure_fn

from rlcore.schema import describe, types
from rlcore.schema.problem import Problem, ProblemsError
from rlcore.schema.suggestions import nearest

Hook = Callable[[Any, Any], Any]

WORDS_FOR_NONE = ("none", "null", "None")


@define
class Mismatch(ValueError):
    """A value is not of its type; becomes a Problem once its path is known."""

    value: object
    expected: str
    remedy: str = ""


class OutOfRange(Mismatch):
    """A value is of its type, but none that its field takes."""


NOT_FINITE = "Write the number that is meant: nothing can be computed with this one."


class NotFinite(OutOfRange):
    """Error for NaN or an infinity in a field of finite numbers."""

    def __init__(self, value: object, tp: Any) -> None:
        words = describe.expectation(tp)
        super().__init__(value, words if "inf" in words else words.replace("number", "finite number", 1), NOT_FINITE)


def structure(value: object, tp: Any, path: str) -> tuple[Any, list[Problem]]:
    """Convert a recipe's value to a type, such as a table to an instance of an attrs class. Return None and every problem where
    the value has any. `path` is the value's own."""
    try:
        return converter().structure(value, tp), []
    except Exception as error:
        return None, list(_problems(error, path, value))


@functools.cache
def converter() -> Converter:
    """Return a strict cattrs converter. By itself cattrs turns "false" into True and 3.7 into 3."""
    made = Converter(forbid_extra_keys=True, detailed_validation=True)
    for scalar in (bool, int, float, str, Path):
        made.register_structure_hook(scalar, _scalar)
    made.register_structure_hook_func(lambda tp: tp in (object, Any), lambda value, _: value)
    made.register_structure_hook_func(_is_choice, _choice)
    made.register_structure_hook_factory(types.is_union, functools.partial(_union_hook, made))
    made.register_structure_hook_factory(types.is_array, functools.partial(_array_hook, made))
    made.register_structure_hook_factory(types.is_mapping, functools.partial(_mapping_hook, made))
    made.register_structure_hook_factory(attrs.has, functools.partial(_class_hook, made))
    made.register_structure_hook_factory(types.is_constrained, functools.partial(_constrained_hook, made))
    return made


def _is_choice(tp: Any) -> bool:
    origin: object = typing.get_origin(tp)
    return origin is Literal


def _scalar(value: Any, tp: Any) -> Any:
    """Takes an int for a float, where that loses nothing, and no other type in place of one."""
    if tp is float and type(value) is int and abs(value) <= 2**53:
        return float(value)
    if tp is float and type(value) is float and math.isnan(value):
        raise NotFinite(value, tp)
    if type(value) is not (str if tp is Path else tp):
        raise Mismatch(value, describe.expectation(tp), _scalar_remedy(value, tp))
    if type(value) is int and not -(2**63) <= value < 2**63:
        raise Mismatch(value, "an integer of 64 bits")
    return Path(value) if tp is Path else value


def _scalar_remedy(value: object, tp: object) -> str:
    """Return the value that a user who wrote this most likely meant."""
    if isinstance(value, str) and tp is not str:
        if value.lower() in ("true", "false") and tp is bool:
            return f"Write {value.lower()}, without quotes."
        if value in WORDS_FOR_NONE:
            return "Leave the key out for none."
        with_zero = _number(value)
        if tp in (int, float) and with_zero is not None:
            shown = f"{with_zero:g}" if tp is float else f"{with_zero:.0f}"
            return f"Write {shown}, without quotes." if tp is float or with_zero.is_integer() else ""
    if tp is str and isinstance(value, bool | int | float):
        return f'Write "{describe.toml_literal(value)}", with its quotes; on the command line, these within single ones.'
    if tp is int and isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return f"Write {value:.0f}."
    return ""


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _choice(value: Any, tp: Any) -> Any:
    """One of a Literal's values; True is not 1 here."""
    choices = typing.get_args(tp)
    if types.is_choice(value, choices):
        return value
    remedy = ""
    if isinstance(value, str):
        near = nearest(value.lower(), [str(choice) for choice in choices])
        remedy = f"Did you mean {describe.toml_literal(near)}?" if near else ""
    raise Mismatch(value, describe.expectation(tp), remedy)


def _union_hook(made: Converter, tp: Any) -> Hook:
    """The first alternative that takes the value. TOML has no null, so None is only ever a default."""
    branches = sorted(types.alternatives(tp), key=lambda branch: branch is float)
    hooks = [(branch, made.get_structure_hook(branch)) for branch in branches]

    def hook(value: Any, _: Any) -> Any:
        arrays = [pair for pair in hooks if types.is_array(pair[0])] if isinstance(value, list) else []
        fitting = arrays or [pair for pair in hooks if types.is_table(pair[0]) == isinstance(value, Mapping)]
        if len(hooks) == 1 or len(fitting) == 1:
            branch, only = hooks[0] if len(hooks) == 1 else fitting[0]
            return only(value, branch)
        for branch, candidate in hooks:
            try:
                return candidate(value, branch)
            except (ValueError, ClassValidationError, IterableValidationError):
                continue
        if type(value) is float and not math.isfinite(value):
            raise NotFinite(value, tp)
        raise Mismatch(value, describe.expectation(tp))

    return hook


def _array_hook(made: Converter, tp: Any) -> Hook:
    """Takes arrays alone: a string is a sequence too, of its letters."""
    cls = types.origin(tp)
    make = cls if cls in (list, set, frozenset) else tuple
    arguments = typing.get_args(tp)
    fixed = issubclass(cls, tuple) and bool(arguments) and Ellipsis not in arguments
    item = types.item_type(tp)
    items = list_structure_factory(typing.cast("type", list[item]), made)  # type: ignore[valid-type]

    def hook(value: Any, _: Any) -> Any:
        if type(value) is not list:
            remedy = "Put it into [brackets]." if isinstance(value, str | int | float) else ""
            raise Mismatch(value, describe.expectation(tp), remedy)
        if fixed and len(value) != len(arguments):
            raise Mismatch(value, f"{describe.expectation(tp)}, {len(arguments)} of them")
        return make(items(value, list))

    return hook


def _constrained_hook(made: Converter, tp: Any) -> Hook:
    """The type's own hook, then the conditions written beside it."""
    inner = types.plain(tp)
    hook = made.get_structure_hook(inner)

    def constrained(value: Any, _: Any) -> Any:
        try:
            made_of = hook(value, inner)
        except NotFinite:
            raise NotFinite(value, tp) from None
        for condition in types.constraints(tp):
            if not condition.accepts(made_of):
                if type(made_of) is float and not math.isfinite(made_of):
                    raise NotFinite(value, tp)
                raise OutOfRange(value, describe.expectation(tp), condition.remedy)
        return made_of

    return constrained


def _mapping_hook(made: Converter, tp: Any) -> Hook:
    key, item = typing.get_args(tp) or (str, object)
    items = mapping_structure_factory(dict[key, item], made)  # type: ignore[valid-type]

    def hook(value: Any, _: Any) -> Any:
        if not isinstance(value, Mapping):
            raise Mismatch(value, "a table")
        return items(value, dict)

    return hook


def _class_hook(made: Converter, cls: Any) -> Hook:
    describe.fields(cls)
    fill = make_dict_structure_fn(cls, made, _cattrs_forbid_extra_keys=True, _cattrs_detailed_validation=True)

    def hook(value: Any, _: Any) -> Any:
        if not isinstance(value, Mapping):
            raise Mismatch(value, "a table")
        return fill({name: _in_our_words(item, cls, name) for name, item in value.items()}, cls)

    return hook


def _in_our_words(item: object, cls: type, name: str) -> object:
    """Translate an alias that the field declares; any other item stays as it is."""
    field = describe.fields(cls).get(name)
    words: Mapping[str, object] = {} if field is None else field.metadata.get(describe.WORDS, {})
    return words.get(item, item) if isinstance(item, str) else item


def _problems(error: BaseException, path: str, value: object) -> Iterator[Problem]:
    """Flatten a converter exception into Problems."""
    match error:
        case Mismatch():
            in_range = not isinstance(error, OutOfRange)
            found = describe.describe_value(error.value) if in_range else describe.toml_literal(error.value)
            yield Problem(path=path, found=found, expected=error.expected, remedy=error.remedy)
        case ClassValidationError() | IterableValidationError():
            inside, others = error.group_exceptions()
            for part, note in inside:
                name = note.name if hasattr(note, "name") else note.index
                if isinstance(part, KeyError) and isinstance(value, Mapping) and name not in value:
                    yield missing_key(f"{path}.{name}", error.cl, str(name))
                else:
                    where = f"{path}[{name}]" if isinstance(name, int) else f"{path}.{name}"
                    yield from _problems(part, where, _item(value, name))
            for other in others:
                yield from _problems(other, path, value)
        case ForbiddenExtraKeysError():
            names = list(describe.fields(error.cl))
            for name in sorted(error.extra_fields):
                yield unknown_key(f"{path}.{name}", names)
        case ProblemsError():
            for problem in error.problems:
                yield attrs.evolve(problem, path=f"{path}.{problem.path}")
        case _:
            yield Problem(path=path, found=_refused(value), expected=f"what its checks accept: {error}")


def _item(value: object, name: int | str) -> object:
    try:
        return value[name]  # type: ignore[index]
    except (LookupError, TypeError):
        return None


def _refused(value: object) -> str:
    """A value that its class's own checks refuse; of a table, what it says."""
    if not isinstance(value, Mapping):
        return describe.describe_value(value)
    written = [
        f"{name} = {describe.toml_literal(item)}" for name, item in value.items() if not isinstance(item, Mapping | list)
    ]
    return ", ".join(written) or "a table"


def missing_key(path: str, cls: type, name: str) -> Problem:
    """A key without a default that the recipe does not give."""
    doc = describe.docs(cls).get(name, "")
    return Problem(path=path, found="nothing", expected=describe.expectation(describe.fields(cls)[name].type), remedy=doc)


def unknown_key(path: str, names: Sequence[str], remedy: str = "") -> Problem:
    """A key that does not exist, in a table that has `names`."""
    section, _, name = path.rpartition(".")
    near = nearest(name, names)
    if near:
        remedy = f"Did you mean {section}.{near}?" if section else f"Did you mean {near}?"
    return Problem(path=path, found="an unknown key", expected=f"one of {', '.join(names)}" if names else "none", remedy=remedy)
