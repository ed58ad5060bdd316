"""Rows of an Arrow table: Parquet files and data sets of the Hub."""

from collections.abc import Iterator

import pyarrow as pa

from rlcore.config.data import DatasetConfig
from rlcore.run.data.arrow_nulls import cleaner
from rlcore.run.data.row_fields import RowReader
from rlcore.spi import DataError, LazyRows, Row

CHUNK_ROWS = 1024


class ArrowRows(LazyRows):
    """Rows of an Arrow table, without filler nulls. Each row becomes Python objects when it is taken."""

    def __init__(self, table: pa.Table, reader: RowReader) -> None:
        super().__init__(table.num_rows, lambda number: self._read(number, table.slice(number, 1).to_pylist()[0]))
        self._reader, self._clean = reader, cleaner(table.schema)
        self.table = table
        """The table of all rows, those outside of a slice too."""

    def __iter__(self) -> Iterator[Row]:
        if self.numbers.step != 1:
            yield from super().__iter__()
            return
        number = self.numbers.start
        for batch in self.table.slice(number, len(self)).to_batches(max_chunksize=CHUNK_ROWS):
            yield from (self._read(place, row) for place, row in enumerate(batch.to_pylist(), start=number))
            number += batch.num_rows

    def _read(self, number: int, row: Row) -> Row:
        return self._reader.read(self._clean(row), f"row {number} (the first is 0)")


def arrow_rows(table: pa.Table, reader: RowReader) -> ArrowRows:
    """Return the rows of a table, once its columns and texts are checked: DataError where one has a wrong type, or a row has no
    prompt. Everything else in a row is checked when it is taken."""
    config, key = reader.config, reader.key
    has_prompts = reader.has_prompts and not (reader.may_be_chats and config.messages_field in table.column_names)
    reader.require_prompt_field(table.column_names, f"{config.path}")
    table = table if config.limit is None else table.slice(0, config.limit)
    _require_utf8(table, config, key)
    if has_prompts:
        _require_prompts(table, config, key)
    return ArrowRows(table, reader)


def _require_prompts(table: pa.Table, config: DatasetConfig, key: str) -> None:
    """DataError where a row has no prompt."""
    prompts = table.column(config.prompt_field)
    if not _holds_prompts(prompts.type):
        raise DataError(
            f"{key}: the field {config.prompt_field!r} of {config.path} holds {prompts.type}; expected text, or lists of "
            "chat messages with role and content"
        )
    if prompts.null_count:
        first = prompts.is_null().index(True).as_py()
        raise DataError(
            f"{key}: row {first} of {config.path} (the first is 0) has no {config.prompt_field!r}: it is null there and in "
            f"{prompts.null_count - 1} other rows; expected a prompt in every row"
        )


def _require_utf8(table: pa.Table, config: DatasetConfig, key: str) -> None:
    """DataError names the first row with a text that is none. What numbers and times hold, pyarrow reads in any case."""
    checked = table.select([name for name in table.column_names if not pa.types.is_primitive(table.field(name).type)])
    try:
        checked.validate(full=True)
        return
    except pa.ArrowException as error:
        if "UTF8" not in str(error):
            raise DataError(f"{key}.path: {config.path} is damaged: {error}. Write or download it again") from error
    first, end = 0, table.num_rows
    while end - first > 1:
        middle = (first + end) // 2
        first, end = (first, middle) if _undecodable(table.slice(first, middle - first)) else (middle, end)
    if fields := ", ".join(map(repr, _undecodable(table.slice(first, 1)))):  # else it lies beyond the limit
        raise DataError(
            f"{key}.path: {config.path}, row {first} (the first is 0): found bytes that are not UTF-8 in the field {fields}; "
            "expected text. Write the file anew with text in UTF-8"
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
