"""The data source "jsonl": rows of a JSONL file."""

import json
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import numpy as np

from rlcore.run.data.jsonl_line import parse_line
from rlcore.spi import DataError, DataSourceRequest, Row
from rlcore.spi.arrays import Int64Array
from rlcore.text_file import read_text_file


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
