"""Parses values of KEY=VALUE arguments and of references by the grammar of hydra and OmegaConf."""

import re
from typing import Any

_INTEGER = re.compile(r"[+-]?(?:0|[1-9](?:_?[0-9])*)")
_FLOAT = re.compile(
    r"[+-]?(?:(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9]+)(?:e[+-]?[0-9]+)?|[0-9][0-9_]*e[+-]?[0-9]+|\.?inf|\.?nan)", re.I
)
_ESCAPED = re.compile(r"\\([\\()\[\]{}:=, \t])")
_CAST = re.compile(r"(int|float|str|bool)\((.*)\)", re.DOTALL)
_WORDS = {"null": None, "true": True, "false": False}


def value_of(text: str) -> Any:
    """Parse null, a Boolean, a number, a quoted text, a list or a table; return any other text unchanged."""
    stripped = text.strip()
    try:
        if stripped[:1] in ("[", "{", "'", '"'):
            value, end = _element(stripped, 0, "")
            return value if end == len(stripped) else text
        if cast := _CAST.fullmatch(stripped):
            return _cast(cast[1], value_of(cast[2]))
    except (ValueError, TypeError, OverflowError):
        return text
    return _primitive(stripped)


def _cast(name: str, value: Any) -> Any:
    if name == "str":
        return str({True: "true", False: "false"}.get(value, value)) if isinstance(value, bool) else str(value)
    if name == "bool" and isinstance(value, str):
        return _WORDS[value.lower()] if value.lower() in ("true", "false") else value
    return {"int": int, "float": float, "bool": bool}[name](value)


def _primitive(text: str) -> Any:
    lower = text.lower()
    if lower in _WORDS:
        return _WORDS[lower]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(lower.replace(".inf", "inf").replace(".nan", "nan"))
    return _ESCAPED.sub(r"\1", text)


def _element(text: str, at: int, ends: str) -> tuple[Any, int]:
    """Return the value that begins at position `at`, and the position after it. ValueError where it does not end.

    A value without brackets and quotes ends before a character of `ends`.
    """
    at = _behind_spaces(text, at)
    sign = text[at : at + 1]
    if sign in ("'", '"'):
        return _quoted(text, at)
    if sign == "[":
        return _list(text, at)
    if sign == "{":
        return _table(text, at)
    end, depth = at, 0
    while end < len(text) and (depth or text[end] not in ends):
        depth += (text.startswith("${", end)) - (depth > 0 and text[end] == "}")
        end += 2 if text[end] == "\\" else 1
    if end >= len(text):
        raise ValueError("a value without an end")
    return _primitive(text[at:end].strip()), end


def _quoted(text: str, at: int) -> tuple[str, int]:
    quote = text[at]
    match = re.compile(rf"{quote}((?:\\.|[^\\{quote}])*){quote}", re.DOTALL).match(text, at)
    if match is None:
        raise ValueError("a text without its second quote")
    halved = re.sub(rf"(\\+)({quote}|$)", lambda found: found[1][: len(found[1]) // 2] + found[2], match[1])
    return halved, match.end()


def _list(text: str, at: int) -> tuple[list[Any], int]:
    found: list[Any] = []
    at = _behind_spaces(text, at + 1)
    while text[at : at + 1] != "]":
        value, at = _element(text, at, ",]")
        found.append(value)
        at = _next(text, at, "]")
    return found, at + 1


def _table(text: str, at: int) -> tuple[dict[str, Any], int]:
    found: dict[str, Any] = {}
    at = _behind_spaces(text, at + 1)
    while text[at : at + 1] != "}":
        key, at = _element(text, at, ":,}")
        at = _behind_spaces(text, at)
        if text[at : at + 1] != ":":
            raise ValueError("a key without a value")
        found[str(key)], at = _element(text, at + 1, ",}")
        at = _next(text, at, "}")
    return found, at + 1


def _next(text: str, at: int, end: str) -> int:
    """Return the position of the next entry, or of the closing bracket."""
    at = _behind_spaces(text, at)
    if text[at : at + 1] == ",":
        return _behind_spaces(text, at + 1)
    if text[at : at + 1] != end:
        raise ValueError(f"no comma and no {end}")
    return at


def _behind_spaces(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at
