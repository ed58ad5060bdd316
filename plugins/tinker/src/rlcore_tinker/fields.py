"""Reads the fields of JSON requests, strictly."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from rlcore_tinker.errors import refuse

T = TypeVar("T")
MAX_NUMBER = float(np.finfo(np.float32).max)
"""The largest number of float32."""
LEAST_NUMBER = float(np.finfo(np.float32).tiny)
"""The least number above 0 of float32 that is as exact as others."""
_MISSING = object()
_KINDS: Mapping[str, Callable[[Any], bool]] = {
    "a text": lambda value: isinstance(value, str),
    "a whole number": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "a number of float32": lambda value: (
        isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_NUMBER
    ),
    "true or false": lambda value: isinstance(value, bool),
    "an object": lambda value: isinstance(value, dict),
    "a list": lambda value: isinstance(value, list),
}


class Fields:
    """One JSON object. The readers note what is wrong, and `done` refuses it all at once."""

    def __init__(self, body: Any, what: str) -> None:
        """RequestError where `body` is no object. `what` names the request, or the path of the object within it."""
        if not isinstance(body, dict):
            refuse([f"{what}: found {type(body).__name__}; expected an object"])
        self._body, self._what = body, what
        self._read: set[str] = {"type"}
        self._problems: list[str] = []

    def text(self, name: str, default: Any = _MISSING) -> Any:
        """Return a text, or the default where there is none."""
        return self._value(name, "a text", default)

    def number(self, name: str, default: Any = _MISSING, *, least: float = -math.inf, below: float = math.inf) -> Any:
        """Return a number in a range."""
        return self._bounded(
            name,
            float(value) if (value := self._value(name, "a number of float32", default)) is not None else None,
            least,
            below,
        )

    def integer(self, name: str, default: Any = _MISSING, *, least: float = -math.inf, below: float = math.inf) -> Any:
        """Return a whole number in a range."""
        return self._bounded(name, self._value(name, "a whole number", default), least, below)

    def flag(self, name: str, default: Any = _MISSING) -> Any:
        """Return True or False."""
        return self._value(name, "true or false", default)

    def mapping(self, name: str, default: Any = _MISSING) -> Any:
        """Return an object."""
        return self._value(name, "an object", default)

    def items(self, name: str, default: Any = _MISSING) -> Any:
        """Return a list."""
        return self._value(name, "a list", default)

    def any(self, name: str, default: Any = None) -> Any:
        """Return a value of any kind."""
        self._read.add(name)
        return self._body.get(name, default)

    def ignored(self, *names: str) -> None:
        """Accept fields that say nothing to this server: the client's own bookkeeping."""
        self._read.update(names)

    def problem(self, name: str, found: object, expected: str) -> None:
        """Note what is wrong with a field."""
        self._problems.append(f"{self._what}.{name}: found {found!r:.100}; expected {expected}")

    def done(self) -> None:
        """RequestError with everything that was noted, and with the fields that nobody read."""
        for name in self._body:
            if name not in self._read:
                self.problem(name, self._body[name], "no such field in the protocol that this server speaks")
        refuse(self._problems)

    def _value(self, name: str, kind: str, default: Any) -> Any:
        self._read.add(name)
        value = self._body.get(name)
        if value is None:
            if default is _MISSING:
                self._problems.append(f"{self._what}.{name}: found nothing; expected {kind}")
                return _neutral(kind)
            return default
        if not _KINDS[kind](value):
            self.problem(name, value, kind)
            return _neutral(kind) if default is _MISSING else default
        return value

    def _bounded(self, name: str, value: Any, least: float, below: float) -> Any:
        if value is not None and not least <= value < below:
            top = "" if below == math.inf else f" and below {below:g}"
            self.problem(name, value, f"at least {least:g}{top}")
        return value


def _neutral(kind: str) -> Any:
    """A value of the kind, in place of one that is wrong: the readers go on, and `done` refuses."""
    return {"a text": "", "an object": {}, "a list": [], "true or false": False}.get(kind, 1)


def tokens_of(chunks: Sequence[Any], path: str) -> list[int]:
    """Return the token ids of `model_input.chunks` in JSON. RequestError for chunks of other kinds."""
    problems, tokens = [], list[int]()
    for number, chunk in enumerate(chunks):
        kind, found = (chunk.get("type"), chunk.get("tokens")) if isinstance(chunk, dict) else (type(chunk).__name__, None)
        if kind != "encoded_text" or not isinstance(found, list) or not all(_KINDS["a whole number"](one) for one in found):
            problems.append(f"{path}.chunks[{number}]: found a chunk of {kind!r:.60}; expected encoded_text with token ids")
        else:
            tokens += found
    refuse(problems)
    return tokens
