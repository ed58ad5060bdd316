"""The data source "jsonl": rows of a JSONL file."""

import json
import re
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from rlcore.reading import MAX_LINE_BYTES, read_text_file
from rlcore.schema.file_limits import unique_keys
from rlcore.schema.printable import described
from rlcore.spi import DataError, DataSourceRequest, Row
from rlcore.spi.arrays import Int64Array

_SUSPECT = re.compile(rb"\\u(0000|[dD][89a-fA-F])")
_NO_CHARACTER = re.compile("[\0\ud800-\udfff]")


def parse_line(line: bytes) -> dict[str, Any]:
    """The line's object. ValueError says what the line is or holds instead, to be put behind its name."""
    if len(line) > MAX_LINE_BYTES:
        raise ValueError(f"has {len(line) / 2**20:.0f} MiB; expected at most {MAX_LINE_BYTES // 2**20}: one JSON object a line")
    if b"\0" in line:
        raise ValueError(f"holds a NUL byte: {line[:60]!r}; expected text in UTF-8")
    try:
        row = json.loads(line, parse_constant=_refuse_constant, object_pairs_hook=unique_keys)
    except RecursionError as error:
        raise ValueError(f"is nested too deeply to be read: {line[:60]!r}; expected one JSON object a line") from error
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError, and numbers of thousands of digits
        raise ValueError(f"is no JSON ({error}): {line[:60]!r}; expected one JSON object a line") from error
    if not isinstance(row, dict):
        raise ValueError(f"holds a JSON {type(row).__name__}; expected one JSON object a line")
    if _SUSPECT.search(line):
        for path, text in _texts(row, ""):
            if match := _NO_CHARACTER.search(text):
                named = "a NUL character" if match[0] == "\0" else described(match[0])
                raise ValueError(f"holds {named} in the field {path!r}, at character {match.start()}; expected Unicode text")
    return row


def _texts(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Every text in a value, keys too, with its place."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _texts(item, f"{path}[{index}]")
    elif isinstance(value, dict):
        for key, item in value.items():
            below = f"{path}.{key}" if path else key
            yield below, key
            yield from _texts(item, below)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value; write null, or leave the field out")


class JsonlRows(Sequence[Row]):
    """The lines of a JSONL file, parsed as they are taken."""

    def __init__(self, lines: bytes, bounds: Int64Array) -> None:
        """`bounds` int64 [N, 2]: first and last-plus-one byte of each row in `lines`."""
        self._lines, self._bounds = lines, bounds

    def __len__(self) -> int:
        return len(self._bounds)

    def __getitem__(self, number: int) -> Row:  # type: ignore[override]  # slices are not asked for
        start, end = self._bounds[number].tolist()
        row: Row = json.loads(self._lines[start:end])
        return row

    def line(self, number: int) -> int:
        """Return the line of the file that a row is, from 1."""
        return self._lines.count(b"\n", 0, int(self._bounds[number, 0])) + 1


def read(request: DataSourceRequest) -> JsonlRows:
    """Read and check the rows of a JSONL file. The DataError names the first line that is no row."""
    content = read_text_file(Path(request.path), request.key)
    bounds: list[tuple[int, int]] = []
    start = 0
    for number, line in enumerate(BytesIO(content), start=1):
        if request.limit is not None and len(bounds) >= request.limit:
            break
        if line.strip():
            where = f"{request.path}, line {number}"
            try:
                row = parse_line(line)
            except ValueError as error:
                raise DataError(f"{request.key}.path: {where} {error}") from error
            request.check(row, where)
            bounds.append((start, start + len(line)))
        start += len(line)
    return JsonlRows(content, np.asarray(bounds, np.int64).reshape(-1, 2))
