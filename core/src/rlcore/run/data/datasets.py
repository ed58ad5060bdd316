"""Data sets: rows from the environment, a JSONL or Parquet file or a Hub name, and the order in which steps take them.

Whatever a data set calls its fields, rows carry the prompt as `prompt` and the completion as `completion`; all other fields
stay as they are.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, TypeAlias, overload

import numpy as np
import pyarrow as pa
from attrs import frozen

from rlcore.config.recipe import DatasetConfig
from rlcore.registry.plugin_errors import attributed
from rlcore.run.data.jsonl_line import parse_line
from rlcore.run.data.seeds import Stream
from rlcore.schema.suggestions import nearest, similar_path
from rlcore.spi import ContractError, DataError, Environment, Row
from rlcore.spi.arrays import Int64Array

Split: TypeAlias = Literal["train", "evaluation"]

PROMPT, COMPLETION = "prompt", "completion"
_USUAL_PROMPT_FIELDS = ("question", "problem", "instruction", "messages", "input", "query", "text")


def load_rows(
    config: DatasetConfig, split: Split, environment: Environment | None, owner: str = "environment"
) -> Sequence[Row]:
    """The rows of `[data.<split>]`, at least one; DataError where there are none or one has no prompt. `owner` is what messages
    call the environment.

    A file is read whole and every row is checked. Rows are parsed when they are taken: a large data set costs the memory of
    its file, not of its objects.
    """
    key = f"data.{split}"
    if config.source == "environment":
        rows = _environment_rows(config, key, split, environment, owner)
    elif config.source == "jsonl":
        rows = _jsonl_rows(config, key)
    else:
        table = _parquet_table(config, key) if config.source == "parquet" else _hub_table(config, key)
        rows = _arrow_rows(table, config, key)
    if len(rows) == 0:
        where = f"the environment's {split!r} split" if config.path is None else f"{config.path}"
        limited = "" if config.limit is None else f" ({key}.limit is {config.limit})"
        raise DataError(f"{key}: found no rows in {where}{limited}; expected at least one")
    return rows


def row_name(rows: Sequence[Row], number: int) -> str:
    """How errors call a row: by its number, and by its line in a JSONL file."""
    line = f"; line {rows.line(number)} of the file" if isinstance(rows, JsonlRows) else ""
    return f"row {number} (the first is 0{line})"


def prompt_fault(value: object) -> str | None:
    """What keeps `value` from being a prompt (text, or chat messages), or None where nothing does."""
    if isinstance(value, str):
        return None if value else "an empty text"
    if not isinstance(value, Sequence) or isinstance(value, bytes):
        return f"{type(value).__name__} {value!r:.60}"
    if not value:
        return "an empty list of messages"
    for number, message in enumerate(value):
        if not isinstance(message, Mapping):
            return f"{type(message).__name__} as message {number}"
        for name in ("role", "content"):
            if not isinstance(message.get(name), str):
                return f"message {number} whose {name!r} is {type(message.get(name)).__name__}, not text"
    return None


def _environment_rows(
    config: DatasetConfig, key: str, split: Split, environment: Environment | None, owner: str
) -> Sequence[Row]:
    rows = None if environment is None else _rows_of(environment, split, owner)
    if rows is None:
        has = "the recipe names no environment" if environment is None else f"the environment brings no {split!r} rows"
        raise DataError(
            f'{key}.source: found "environment", but {has}. Name a data set: {key}.source = "jsonl" (or "parquet", '
            f'"huggingface") and {key}.path'
        )
    return rows if config.limit is None else rows[: config.limit]


def _rows_of(environment: Environment, split: Split, owner: str) -> Sequence[Row] | None:
    with attributed(f"raised in rows({split!r}) of", owner):
        rows = environment.rows(split)
        if rows is None:
            return None
        is_sequence = hasattr(rows, "__len__") and hasattr(rows, "__getitem__")
        first = rows[0] if is_sequence and len(rows) else {}
    expected = "expected a sequence of records, which are mappings, or None"
    if not is_sequence:
        raise ContractError(f"{owner}: rows({split!r}) returned a {type(rows).__name__}; {expected}")
    if not isinstance(first, Mapping):
        raise ContractError(f"{owner}: rows({split!r}) returned rows of {type(first).__name__}; {expected}")
    return rows


def _existing_path(config: DatasetConfig, key: str) -> Path:
    if config.path is None:
        raise DataError(f"{key}.path: found nothing; expected the file that {key}.source = {config.source!r} reads")
    path = Path(config.path).expanduser()
    if not path.exists():
        raise DataError(f"{key}.path: found no file {path}; expected a {config.source} file. {similar_path(path)}".rstrip(". "))
    return path


def _no_such_field(key: str, where: str, wanted: str, found: Sequence[str]) -> DataError:
    near = nearest(wanted, found) or next((name for name in _USUAL_PROMPT_FIELDS if name in found), None)
    hint = f'. Did you mean {key}.prompt_field = "{near}"?' if near else f". Set {key}.prompt_field to one of them"
    listed = ", ".join(map(repr, found)) or "none"
    return DataError(f"{key}: {where} lacks the field {wanted!r} ({key}.prompt_field); found the fields {listed}{hint}")


# JSONL


class JsonlRows(Sequence[Row]):
    """The lines of a JSONL file, parsed as they are taken."""

    def __init__(self, lines: bytes, bounds: Int64Array, config: DatasetConfig) -> None:
        """`bounds` int64 [N, 2]: first and last-plus-one byte of each row in `lines`."""
        self._lines, self._bounds, self._config = lines, bounds, config

    def __len__(self) -> int:
        return len(self._bounds)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        if isinstance(index, slice):
            return JsonlRows(self._lines, self._bounds[index], self._config)
        start, end = self._bounds[index].tolist()
        return _renamed(json.loads(self._lines[start:end]), self._config)

    def line(self, index: int) -> int:
        """The number of a row's line in the file, from 1."""
        return self._lines.count(b"\n", 0, int(self._bounds[index, 0])) + 1


def _renamed(row: dict[str, Any], config: DatasetConfig) -> Row:
    for name, field_name in ((PROMPT, config.prompt_field), (COMPLETION, config.completion_field)):
        if field_name != name and field_name in row:
            row[name] = row[field_name]
    return row


def _jsonl_rows(config: DatasetConfig, key: str) -> JsonlRows:
    path = _existing_path(config, key)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{key}.path: cannot read {path}: {error}") from error
    bounds: list[tuple[int, int]] = []
    start = 0
    for number, line in enumerate(BytesIO(content), start=1):
        if config.limit is not None and len(bounds) >= config.limit:
            break
        if line.strip():
            _check_line(line, f"{path}, line {number}", config, key)
            bounds.append((start, start + len(line)))
        start += len(line)
    return JsonlRows(content, np.asarray(bounds, np.int64).reshape(-1, 2), config)


def _check_line(line: bytes, where: str, config: DatasetConfig, key: str) -> None:
    try:
        row = parse_line(line)
    except ValueError as error:
        raise DataError(f"{key}.path: {where} {error}") from error
    if config.prompt_field not in row:
        raise _no_such_field(key, where, config.prompt_field, list(row))
    if fault := prompt_fault(row[config.prompt_field]):
        raise DataError(
            f"{key}: {where}: the field {config.prompt_field!r} holds {fault}; expected text, or a list of chat messages "
            '{"role": …, "content": …}'
        )


# Arrow: Parquet files and Hub data sets


class ArrowRows(Sequence[Row]):
    """The rows of an Arrow table, made into Python objects as they are taken."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __iter__(self) -> Iterator[Row]:
        for batch in self._table.to_batches(max_chunksize=1024):
            yield from batch.to_pylist()

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        if isinstance(index, slice):
            start, stop, stride = index.indices(len(self))
            table = self._table.slice(start, max(stop - start, 0))
            return ArrowRows(table if stride == 1 else self._table.take(list(range(start, stop, stride))))
        number = range(len(self))[index]  # IndexError beyond the end, and negative numbers count from there
        row: Row = self._table.slice(number, 1).to_pylist()[0]
        return row


def _parquet_table(config: DatasetConfig, key: str) -> pa.Table:
    from pyarrow import parquet

    path = _existing_path(config, key)
    try:
        return parquet.read_table(path, memory_map=True)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{key}.path: {path} does not read as Parquet: {error}") from error


def _hub_table(config: DatasetConfig, key: str) -> pa.Table:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise DataError(
            f'{key}.source: found "huggingface", which needs the package `datasets` ({error}). Install it: '
            "pip install 'rlcore[datasets]'"
        ) from error
    if config.path is None:
        raise DataError(f"{key}.path: found nothing; expected a data set's name on the Hub, or a directory of the same form")
    split = config.split or "train"
    try:
        dataset = load_dataset(config.path, name=config.subset, split=split)
    except Exception as error:  # not found, no such split or subset, offline, damaged files: each a class of its own
        subset = "" if config.subset is None else f", subset {config.subset!r}"
        raise DataError(
            f"{key}.path: the data set {config.path!r} (split {split!r}{subset}) does not load: {type(error).__name__}: {error}"
        ) from error
    return dataset.data.table


def _require_utf8(table: pa.Table, config: DatasetConfig, key: str) -> None:
    """DataError names the first row with a text that is none."""
    try:
        table.validate(full=True)
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


def _arrow_rows(table: pa.Table, config: DatasetConfig, key: str) -> ArrowRows:
    names = table.column_names
    if config.prompt_field not in names:
        raise _no_such_field(key, f"{config.path}", config.prompt_field, names)
    table = table if config.limit is None else table.slice(0, config.limit)
    _require_utf8(table, config, key)
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
    for name, field_name in ((PROMPT, config.prompt_field), (COMPLETION, config.completion_field)):
        if field_name != name and field_name in names:
            others = table.drop_columns([name]) if name in table.column_names else table
            table = others.append_column(name, table.column(field_name))
    return ArrowRows(table)


def _holds_prompts(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        kind = kind.value_type
        return bool(pa.types.is_struct(kind)) and {"role", "content"} <= {kind.field(i).name for i in range(kind.num_fields)}
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


# Order


@frozen(kw_only=True)
class PromptStream:
    """Which rows each step takes: a function of the seed and the step alone, so that resuming needs no state.

    The rows are gone through epoch by epoch, shuffled anew for each; a batch may end one epoch and begin the next.
    """

    num_rows: int
    """The number of rows, at least 1."""
    batch_size: int
    """Rows of a step; may exceed num_rows."""
    seed: int
    shuffle: bool

    def indices(self, step: int) -> Int64Array:
        """int64 [batch_size]: row numbers of a step; steps count from 0."""
        return self._rows(step * self.batch_size, (step + 1) * self.batch_size)

    def following(self, step: int) -> Int64Array:
        """int64 [num_rows]: the rows that come after a step's, one whole pass."""
        end = (step + 1) * self.batch_size
        return self._rows(end, end + self.num_rows)

    def _rows(self, position: int, end: int) -> Int64Array:
        parts = []
        while position < end:
            epoch, within = divmod(position, self.num_rows)
            order = _epoch_order(self.num_rows, self.seed, epoch) if self.shuffle else np.arange(self.num_rows, dtype=np.int64)
            parts.append(order[within : within + end - position])
            position += len(parts[-1])
        return np.concatenate(parts)

    def epoch(self, step: int) -> int:
        """The epoch that the step's first row belongs to; both count from 0."""
        return step * self.batch_size // self.num_rows


@lru_cache(maxsize=4)  # steps follow each other within an epoch; shuffling a million rows again for each is slow
def _epoch_order(num_rows: int, seed: int, epoch: int) -> Int64Array:
    return np.random.default_rng([seed, Stream.DATA, epoch]).permutation(num_rows)
