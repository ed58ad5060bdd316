"""Rows of a JSONL file."""

import json
from functools import partial
from io import BytesIO
from pathlib import Path

import numpy as np

from rlcore.run.data.jsonl_line import parse_line
from rlcore.run.data.row_fields import RowReader
from rlcore.run.data.text_file import read_text_file
from rlcore.spi import DataError, LazyRows, Row
from rlcore.spi.arrays import Int64Array


class JsonlRows(LazyRows):
    """The lines of a JSONL file, parsed as they are taken."""

    def __init__(self, lines: bytes, bounds: Int64Array, reader: RowReader) -> None:
        """`bounds` int64 [N, 2]: first and last-plus-one byte of each row in `lines`."""
        super().__init__(len(bounds), partial(_parsed, lines, bounds, reader))
        self._lines, self._bounds = lines, bounds

    def line(self, index: int) -> int:
        """The number of a row's line in the file, from 1."""
        return self._lines.count(b"\n", 0, int(self._bounds[self.numbers[index], 0])) + 1


def jsonl_rows(path: Path, reader: RowReader) -> JsonlRows:
    """Read and check the rows of a JSONL file. The DataError names the first line that is no row."""
    content = read_text_file(path, reader.key)
    limit = reader.config.limit
    bounds: list[tuple[int, int]] = []
    start = 0
    for number, line in enumerate(BytesIO(content), start=1):
        if limit is not None and len(bounds) >= limit:
            break
        if line.strip():
            where = f"{path}, line {number}"
            try:
                row = parse_line(line)
            except ValueError as error:
                raise DataError(f"{reader.key}.path: {where} {error}") from error
            reader.read(row, where)
            bounds.append((start, start + len(line)))
        start += len(line)
    return JsonlRows(content, np.asarray(bounds, np.int64).reshape(-1, 2), reader)


def _parsed(lines: bytes, bounds: Int64Array, reader: RowReader, number: int) -> Row:
    start, end = bounds[number].tolist()
    return reader.read(json.loads(lines[start:end]), f"row {number} (the first is 0)")
