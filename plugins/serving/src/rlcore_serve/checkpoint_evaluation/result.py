"""The figures that a program leaves: names and numbers, from a JSON file or from what it printed."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlcore.schema.file_limits import read_file

PREFIX = "checkpoint_eval/"
SHOWN = 8
"""Names that a message lists at most."""


class NoFiguresError(Exception):
    """Why there are none."""


def read_figures(printed: Path, output: Path, file: str | None, key: str | None) -> dict[str, float]:
    """Return the figures, by names that begin with "checkpoint_eval/". `file` is a pattern below `output`; where it is None,
    they are in the last line of the file `printed` that is a JSON object. NoFiguresError where there are none."""
    found, where = _last_object(printed) if file is None else _newest_file(output, file)
    for part in () if key is None else key.split("."):
        if isinstance(found, list):
            found = {str(number): item for number, item in enumerate(found)}
        if not isinstance(found, dict) or part not in found:
            keys = ", ".join(list(found)[:SHOWN]) if isinstance(found, dict) else f"a {type(found).__name__}"
            raise NoFiguresError(f"{where} has no key {key!r}; at {part!r} there are {keys or 'none'}")
        found = found[part]
    figures = dict(_numbers(found, ""))
    if not figures:
        raise NoFiguresError(f"{where} holds no number{'' if key is None else f' below {key!r}'}; expected names and numbers")
    return {PREFIX + name: value for name, value in figures.items()}


def _last_object(printed: Path) -> tuple[Any, str]:
    lines = _text(printed).splitlines()
    for line in reversed(lines):
        if line.lstrip().startswith("{") and isinstance(found := _parsed(line), dict):
            return found, "what it printed"
    last = repr(next((line for line in reversed(lines) if line.strip()), ""))
    raise NoFiguresError(f"it printed no line that is a JSON object; the last is {last:.100}")


def _newest_file(output: Path, pattern: str) -> tuple[Any, str]:
    files = sorted((path for path in output.glob(pattern) if path.is_file()), key=lambda path: path.stat().st_mtime_ns)
    if not files:
        raise NoFiguresError(f"it wrote no file {pattern} below {output}")
    found = _parsed(_text(files[-1]))
    if not isinstance(found, dict):
        raise NoFiguresError(f"{files[-1]} is no JSON object")
    return found, str(files[-1])


def _text(path: Path) -> str:
    try:
        return read_file(path).decode(errors="replace")
    except OSError as error:
        raise NoFiguresError(f"{path} cannot be read: {error.strerror}") from error


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # no JSON, or too deep
        return None


def _numbers(found: Any, name: str) -> Iterator[tuple[str, float]]:
    if isinstance(found, dict | list):
        items = found.items() if isinstance(found, dict) else enumerate(found)
        for key, value in items:
            yield from _numbers(value, f"{name}/{key}" if name else str(key))
    elif type(found) in (int, float) and name:
        yield name, float(found)
