"""Resolves references of OmegaConf (${a.b}, ${a[0]}, ${.a}, ${oc.env:NAME,default}) and of NeMo-RL (${mul:x,y})."""

import math
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from rlcore_import.override_values import value_of
from rlcore_import.yaml_files import error

FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "mul": lambda *values: math.prod(values),
    "div": lambda first, second: first / second,
    "add": lambda *values: sum(values),
    "sub": lambda first, second: first - second,
    "max": max,
    "min": min,
    "oc.create": lambda value: value,
    "oc.decode": lambda value: value_of(value) if isinstance(value, str) else value,
}
AS_WRITTEN = ("now", "hydra")
"""Functions whose values exist only at run time; their references stay unresolved."""
MOST_STEPS = 64
_INDEX = re.compile(r"\[['\"]?([^\[\]'\"]+)['\"]?\]")
"""A name or number in brackets, which means the same as one behind a point."""


def resolved(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with every reference replaced.

    References to unset environment variables and to values of the run time stay as they are written.
    """
    return {key: _resolve(value, (key,), values, 0) for key, value in values.items()}


def _resolve(value: Any, place: tuple[str, ...], root: Mapping[str, Any], depth: int) -> Any:
    if isinstance(value, Mapping):
        return {key: _resolve(item, (*place, str(key)), root, depth) for key, item in value.items()}
    if isinstance(value, list):
        return [_resolve(item, (*place, str(number)), root, depth) for number, item in enumerate(value)]
    if not isinstance(value, str) or "${" not in value:
        return value
    if depth > MOST_STEPS:
        raise error(".".join(place), f"{value!r}, which refers to itself", "a reference that ends in a value")
    text, behind = "", value
    while (start := behind.find("${")) >= 0:
        end = _end(behind, start, place)
        found = _one(behind[start + 2 : end].strip(), place, root, depth + 1)
        if start == 0 and not text and end == len(behind) - 1:
            return found
        text += f"{behind[:start]}{found}"
        behind = behind[end + 1 :]
    return text + behind


def _end(text: str, start: int, place: tuple[str, ...]) -> int:
    """Return the position of the bracket that closes the reference at `start`."""
    depth = 0
    for match in re.compile(r"[{}]").finditer(text, start):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return match.start()
    raise error(".".join(place), f"{text!r}, a reference without an end", "${KEY}")


def _one(text: str, place: tuple[str, ...], root: Mapping[str, Any], depth: int) -> Any:
    name, is_call, written = text.partition(":")
    if not is_call:
        return _look(str(_resolve(text, place, root, depth)), place, root, depth)
    if name in AS_WRITTEN:
        return f"${{{text}}}"
    arguments = [_resolve(_value(argument), place, root, depth) for argument in _arguments(written)]
    if name == "oc.env":
        default = arguments[1] if len(arguments) > 1 else f"${{{text}}}"
        return os.environ.get(str(arguments[0]), default)
    if name in ("oc.select", "oc.deprecated"):
        fallback = _MISSING if name == "oc.deprecated" else arguments[1] if len(arguments) > 1 else None
        return _look(str(arguments[0]), place, root, depth, default=fallback)
    if name in ("oc.dict.keys", "oc.dict.values"):
        table = _look(str(arguments[0]), place, root, depth)
        if not isinstance(table, Mapping):
            raise error(".".join(place), f"${{{text}}}", "a reference to a table")
        return list(table if name.endswith("keys") else table.values())
    if name not in FUNCTIONS:
        known = ", ".join((*FUNCTIONS, "oc.env", "oc.select", "oc.deprecated", "oc.dict.keys", "oc.dict.values"))
        raise error(".".join(place), f"${{{text}}}", f"one of the functions {known}")
    try:
        return FUNCTIONS[name](*arguments)
    except (TypeError, ValueError, ArithmeticError) as problem:
        raise error(".".join(place), f"${{{text}}}: {problem}", f"numbers that {name} takes") from problem


def _arguments(text: str) -> list[str]:
    """Split a text at the commas outside brackets and quotes."""
    parts, depth, quote, start = [], 0, "", 0
    for place, sign in enumerate(text):
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "\"'":
            quote = sign
        elif sign in "{[(":
            depth += 1
        elif sign in "}])":
            depth -= 1
        elif sign == "," and depth == 0:
            parts.append(text[start:place])
            start = place + 1
    return [part.strip() for part in (*parts, text[start:])]


_MISSING = object()


def _look(key: str, place: tuple[str, ...], root: Mapping[str, Any], depth: int, default: Any = _MISSING) -> Any:
    """Return the value at a key. Each leading point goes one table up from the value that holds the reference."""
    key = _INDEX.sub(r".\1", key)
    points = len(key) - len(key.lstrip("."))
    path = (*place[: len(place) - points], *key.lstrip(".").split(".")) if points else tuple(key.split("."))
    found: Any = root
    for name in path:
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        elif isinstance(found, Mapping) and name in found:
            found = found[name]
        elif default is not _MISSING:
            return default
        else:
            raise error(".".join(place), f"${{{key}}}, which is nowhere", "a reference to a key that is there")
    return _resolve(found, path, root, depth)


def _value(text: str) -> Any:
    """Parse an argument as OmegaConf does; a text with references stays a text."""
    if "${" in text:
        return text
    return {"None": None}.get(text, value_of(text))
