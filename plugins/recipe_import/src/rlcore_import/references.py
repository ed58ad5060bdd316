"""References in values, as OmegaConf writes them: ${a.b}, ${.a}, ${oc.env:NAME,default} and NeMo-RL's ${mul:x,y}."""

import math
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from rlcore_import.yaml_files import error

_INNERMOST = re.compile(r"\$\{([^${}]*)\}")
FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "mul": lambda *values: math.prod(values),
    "div": lambda first, second: first // second if isinstance(first, int) and isinstance(second, int) else first / second,
    "add": lambda *values: sum(values),
    "sub": lambda first, second: first - second,
    "max": max,
    "min": min,
}
AS_WRITTEN = ("now", "hydra")
"""Functions of what is known once a run begins."""
MOST_STEPS = 64


def resolved(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with every reference replaced. One to a variable of the environment that is not set, or to what is known once
    a run begins, stays as it is written."""
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
    while match := _INNERMOST.search(value):
        found = _one(match[1].strip(), place, root, depth + 1)
        if match[0] == value:
            return found
        if isinstance(found, str) and found == match[0]:
            return value  # a variable that is not set, or the time
        value = f"{value[: match.start()]}{'' if found is None else found}{value[match.end() :]}"
    return value


def _one(text: str, place: tuple[str, ...], root: Mapping[str, Any], depth: int) -> Any:
    name, is_call, arguments = text.partition(":")
    if is_call and name == "oc.env":
        variable, _, default = arguments.partition(",")
        default = default.strip()
        return os.environ.get(variable.strip(), None if default == "null" else default or f"${{{text}}}")
    if is_call and name == "oc.select":
        key, _, default = arguments.partition(",")
        return _look(key.strip(), place, root, depth, default=_number(default.strip()))
    if is_call and name in AS_WRITTEN:
        return f"${{{text}}}"
    if is_call:
        if name not in FUNCTIONS:
            raise error(".".join(place), f"${{{text}}}", f"one of the functions {', '.join(FUNCTIONS)}, oc.env and oc.select")
        try:
            return FUNCTIONS[name](*(_number(part.strip()) for part in arguments.split(",")))
        except (TypeError, ValueError, ArithmeticError) as problem:
            raise error(".".join(place), f"${{{text}}}: {problem}", f"numbers that {name} takes") from problem
    return _look(text, place, root, depth)


_MISSING = object()


def _look(key: str, place: tuple[str, ...], root: Mapping[str, Any], depth: int, default: Any = _MISSING) -> Any:
    """The value at a key; each point before it goes one table up, from that of the value which refers."""
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


def _number(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"null": None, "None": None, "true": True, "false": False}.get(text, text)
