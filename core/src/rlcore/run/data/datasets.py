"""Data sets: rows from the environment, a JSONL, CSV or Parquet file or a Hub name.

Whatever a data set calls its fields, rows carry the prompt as `prompt` and the completion as `completion`; all other fields
stay as they are.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import pyarrow as pa

from rlcore.config.data import DatasetConfig
from rlcore.registry.plugin_errors import attributed, described, in_time
from rlcore.run.data.arrow_rows import arrow_rows
from rlcore.run.data.csv_rows import CsvRows, csv_rows
from rlcore.run.data.jsonl_rows import JsonlRows, jsonl_rows
from rlcore.run.data.row_fields import RowReader
from rlcore.schema.file_limits import require_tree
from rlcore.schema.homes import expanded
from rlcore.schema.suggestions import similar_path
from rlcore.spi import AgentEnvironment, ContractError, DataError, Environment, LazyRows, Row

Split: TypeAlias = Literal["train", "evaluation"]
_TIMES = 10.0
"""Multiple of the usual time limit for an environment's rows, which may be downloaded."""


def load_rows(
    config: DatasetConfig,
    split: Split,
    environment: Environment | AgentEnvironment | None,
    owner: str = "environment",
    *,
    key: str | None = None,
    **form: Any,
) -> Sequence[Row]:
    """Read the rows of `[data.<split>]`, or of the section `key`. DataError where there are none, or one cannot be read.

    `form` are further fields of RowReader. `owner` is the environment's name in messages.

    A file is read whole and every row is checked. Rows are parsed when they are taken: a large data set costs the memory of
    its file, not of its objects.
    """
    key = key or f"data.{split}"
    folder = expanded(config.path or "").parent if config.source in ("jsonl", "parquet") else None
    reader = RowReader(config=config, key=key, folder=folder, **form)
    if config.source == "environment":
        rows = _environment_rows(reader, split, environment, owner)
    elif config.source in ("jsonl", "csv"):
        rows = (jsonl_rows if config.source == "jsonl" else csv_rows)(_existing_path(config, key), reader)
    else:
        rows = arrow_rows(_parquet_table(config, key) if config.source == "parquet" else _hub_table(config, key), reader)
    if len(rows) == 0:
        where = f"the environment's {split!r} split" if config.path is None else f"{config.path}"
        limited = "" if config.limit is None else f" ({key}.limit is {config.limit})"
        raise DataError(f"{key}: found no rows in {where}{limited}; expected at least one")
    return rows


def row_name(rows: Sequence[Row], number: int) -> str:
    """How errors call a row: by its number, and by its line in a JSONL or CSV file."""
    line = f"; line {rows.line(number)} of the file" if isinstance(rows, JsonlRows | CsvRows) else ""
    return f"row {number} (the first is 0{line})"


def _environment_rows(
    reader: RowReader, split: Split, environment: Environment | AgentEnvironment | None, owner: str
) -> Sequence[Row]:
    """Return the environment's rows, unchanged unless they are learned or the recipe names other fields."""
    config, key = reader.config, reader.key
    rows = None if environment is None else _rows_of(environment, split, owner)
    if rows is None:
        has = "the recipe names no environment" if environment is None else f"the environment brings no {split!r} rows"
        raise DataError(
            f'{key}.source: found "environment", but {has}. Name a data set: {key}.source = "jsonl" (or "csv", "parquet", '
            f'"huggingface") and {key}.path'
        )
    own = rows if config.limit is None else rows[: config.limit]
    if not reader.maps and not reader.is_learned:
        return own
    read = partial(_read_own, own, reader)
    return LazyRows(len(own), read, getattr(own, "level_of", None))


def _read_own(rows: Sequence[Row], reader: RowReader, number: int) -> Row:
    return reader.read(rows[number], f"row {number} (the first is 0)")


def _rows_of(environment: Environment | AgentEnvironment, split: Split, owner: str) -> Sequence[Row] | None:
    with attributed(f"raised in rows({split!r}) of", owner), in_time(f"rows({split!r}) of {owner}", _TIMES):
        rows = environment.rows(split)
        if rows is None:
            return None
        # A mapping, and a table of columns, have no row 0.
        is_table = callable(getattr(rows, "keys", None)) and not isinstance(rows, Sequence)
        is_sequence = hasattr(rows, "__len__") and hasattr(rows, "__getitem__") and not is_table
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
    path = expanded(config.path)
    if not path.exists():
        raise DataError(f"{key}.path: found no file {path}; expected a {config.source} file. {similar_path(path)}".rstrip(". "))
    return path


def _parquet_table(config: DatasetConfig, key: str) -> pa.Table:
    from pyarrow import parquet

    path = _existing_path(config, key)
    try:
        require_tree(path)
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
        if expanded(config.path).exists():
            require_tree(expanded(config.path))
        dataset = load_dataset(config.path, name=config.subset, split=split)
    except Exception as error:  # not found, no such split or subset, offline, damaged files: each a class of its own
        subset = "" if config.subset is None else f", subset {config.subset!r}"
        raise DataError(
            f"{key}.path: the data set {config.path!r} (split {split!r}{subset}) does not load: {described(error)}"
        ) from error
    return dataset.data.table
