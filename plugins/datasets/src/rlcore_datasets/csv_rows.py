"""Rows of a CSV file (RFC 4180, with a line of names at its beginning)."""

import csv
from collections.abc import Iterator, Sequence
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from rlcore.reading import MAX_LINE_BYTES, read_text_file
from rlcore.spi import DataError, DataSourceRequest
from rlcore.spi.arrays import Int64Array
from rlcore_datasets.arrow_rows import CHUNK_ROWS, ArrowRows

Record: TypeAlias = tuple[int, list[str]]
"""A row's fields, behind the number of the line that it begins on, from 1."""


class CsvRows(ArrowRows):
    """The rows of a CSV file. The format has no types: each field is text."""

    def __init__(self, table: pa.Table, lines: Int64Array) -> None:
        """`lines` int64 [N]: the line that each row begins on, from 1."""
        super().__init__(table)
        self._lines = lines

    def line(self, number: int) -> int:
        """Return the line of the file that a row begins on, from 1."""
        return int(self._lines[number])


def read(request: DataSourceRequest) -> CsvRows:
    """Read and check the rows of a CSV file. The DataError names the first line that is no row, or has no prompt."""
    path, key = Path(request.path), request.key
    records = _records(read_text_file(path, key), path, key)
    _, names = next(records, (1, []))
    _check_names(names, path, key)
    lines: list[int] = []
    batches = []
    rows = islice((_checked(record, names, request) for record in records), request.limit)
    while chunk := list(islice(rows, CHUNK_ROWS)):
        lines += [line for line, _ in chunk]
        columns = zip(*(fields for _, fields in chunk), strict=True)
        batches.append(pa.RecordBatch.from_arrays([pa.array(column, pa.string()) for column in columns], names))
    table = pa.Table.from_batches(batches, pa.schema([(name, pa.string()) for name in names]))
    return CsvRows(table, np.asarray(lines, np.int64))


def _records(content: bytes, path: Path, key: str) -> Iterator[Record]:
    """The records of a file, the names' first, without blank lines."""
    reader = csv.reader(_lines(content, path, key), strict=True)
    limit = csv.field_size_limit(MAX_LINE_BYTES)
    try:
        read = 0
        while True:
            begins = read + 1
            try:
                fields = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                raise DataError(
                    f"{key}.path: {path}, line {begins} is no CSV ({error}); expected fields that commas divide, "
                    "and quotes around one with a comma, a quote or a line's end in it"
                ) from error
            read = reader.line_num
            if fields:
                yield begins, fields
    finally:
        csv.field_size_limit(limit)


def _lines(content: bytes, path: Path, key: str) -> Iterator[str]:
    for number, line in enumerate(BytesIO(content.removeprefix(b"\xef\xbb\xbf")), start=1):
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            found = f"bytes that are not UTF-8 ({error.reason})"
            raise DataError(f"{key}.path: {path}, line {number}: found {found}; expected text in UTF-8") from error
        if "\0" in text:
            raise DataError(f"{key}.path: {path}, line {number} holds a NUL byte: {line[:60]!r}; expected text in UTF-8")
        yield text


def _check_names(names: Sequence[str], path: Path, key: str) -> None:
    """DataError where the first line names no columns."""
    wrong = [name for name in dict.fromkeys(names) if not name.strip() or names.count(name) > 1]
    if wrong:
        listed = ", ".join(map(repr, wrong))
        raise DataError(f"{key}.path: {path}, line 1: found the names {listed}; expected the columns' names, each once")


def _checked(record: Record, names: Sequence[str], request: DataSourceRequest) -> Record:
    line, fields = record
    where = f"{request.path}, line {line}"
    if len(fields) != len(names):
        found = f"{where} has {len(fields)} fields"
        raise DataError(f"{request.key}.path: {found}; expected {len(names)}, as the first line has names")
    request.check(dict(zip(names, fields, strict=True)), where)
    return record
