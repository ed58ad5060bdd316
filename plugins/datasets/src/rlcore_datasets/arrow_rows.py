"""Rows of an Arrow table: Parquet files, CSV files and data sets of the Hub."""

from collections.abc import Iterator, Sequence

import pyarrow as pa

from rlcore.spi import DataError, DataSourceRequest, Row
from rlcore_text.rows.arrow_nulls import cleaner

CHUNK_ROWS = 1024


class ArrowRows(Sequence[Row]):
    """Rows of an Arrow table, without filler nulls. Each row becomes Python objects when it is taken."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table
        self._clean = cleaner(table.schema)

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __getitem__(self, number: int) -> Row:  # type: ignore[override]  # slices are not asked for
        return self._clean(self.table.slice(number, 1).to_pylist()[0])

    def __iter__(self) -> Iterator[Row]:
        for batch in self.table.to_batches(max_chunksize=CHUNK_ROWS):
            yield from map(self._clean, batch.to_pylist())


def checked(table: pa.Table, request: DataSourceRequest) -> ArrowRows:
    """Return the rows of a table, once its columns and texts are checked: DataError where one has a wrong type, or a row has no
    prompt. Everything else in a row is checked when it is taken."""
    table = table if request.limit is None else table.slice(0, request.limit)
    _require_utf8(table, request)
    if request.prompt_field in table.column_names:
        _require_prompts(table.column(request.prompt_field), request)
    return ArrowRows(table)


def _require_prompts(prompts: pa.ChunkedArray, request: DataSourceRequest) -> None:
    """DataError where a row has no prompt."""
    if not _holds_prompts(prompts.type):
        raise DataError(
            f"{request.key}: the field {request.prompt_field!r} of {request.path} holds {prompts.type}; expected text, or "
            "lists of chat messages with role and content"
        )
    if prompts.null_count:
        first = prompts.is_null().index(True).as_py()
        raise DataError(
            f"{request.key}: row {first} of {request.path} (the first is 0) has no {request.prompt_field!r}: it is null there "
            f"and in {prompts.null_count - 1} other rows; expected a prompt in every row"
        )


def _require_utf8(table: pa.Table, request: DataSourceRequest) -> None:
    """DataError names the first row with a text that is none. What numbers and times hold, pyarrow reads in any case."""
    checked = table.select([name for name in table.column_names if not pa.types.is_primitive(table.field(name).type)])
    try:
        checked.validate(full=True)
        return
    except pa.ArrowException as error:
        if "UTF8" not in str(error):
            raise DataError(f"{request.key}.path: {request.path} is damaged: {error}. Write or download it again") from error
    first, end = 0, table.num_rows
    while end - first > 1:
        middle = (first + end) // 2
        first, end = (first, middle) if _undecodable(table.slice(first, middle - first)) else (middle, end)
    if fields := ", ".join(map(repr, _undecodable(table.slice(first, 1)))):  # else it lies beyond the limit
        raise DataError(
            f"{request.key}.path: {request.path}, row {first} (the first is 0): found bytes that are not UTF-8 in the field "
            f"{fields}; expected text. Write the file anew with text in UTF-8"
        )


def _undecodable(table: pa.Table) -> list[str]:
    """The columns with a text that is not UTF-8."""
    found = []
    for name in table.column_names:
        try:
            table.column(name).to_pylist()
        except UnicodeDecodeError:
            found.append(name)
    return found


def _holds_prompts(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_nested(kind) and hasattr(kind, "value_type"):  # a list of any kind
        kind = kind.value_type
        names = {kind.field(i).name for i in range(kind.num_fields)} if pa.types.is_struct(kind) else set()
        return bool(names & {"role", "from"} and names & {"content", "value"}) or pa.types.is_map(kind) or _is_json(kind)
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind) or _is_json(kind)


def _is_json(kind: pa.DataType) -> bool:
    return getattr(kind, "extension_name", "") == "arrow.json"
