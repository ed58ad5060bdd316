"""Data sets: rows from the environment, or from an installed data source.

Whatever a data set calls its fields, rows carry the prompt as `prompt` and the completion as `completion`; all other fields
stay as they are.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rlcore.config.data import DatasetConfig, Split
from rlcore.registry.plugin_errors import attributed, in_time
from rlcore.run.data.mixes import TIMES
from rlcore.schema.file_limits import expanded
from rlcore.schema.suggestions import similar_path
from rlcore.spi import (
    AgentEnvironment,
    ConfigError,
    ContractError,
    DataError,
    DataSourceRequest,
    Environment,
    LazyRows,
    Problem,
    Row,
)
from rlcore.spi.data_source import installed_data_sources, read_rows
from rlcore_text.formats.choice import AUTO, OWN
from rlcore_text.rows.row_fields import RowReader

_OF_NAMES = 6 * TIMES
"""Multiple of the usual time limit for rows of a source of names, such as the Hub."""


class SourceRows(LazyRows):
    """The rows of a data source, each in the core's form once it is taken."""

    def __init__(self, rows: Sequence[Row], reader: RowReader) -> None:
        limit = reader.config.limit
        super().__init__(len(rows) if limit is None else min(limit, len(rows)), self._made)
        self._rows, self._reader = rows, reader

    def __iter__(self) -> Iterator[Row]:
        if self.numbers.start != 0 or self.numbers.step != 1:
            yield from super().__iter__()
            return
        rows = iter(self._rows)  # which may be faster than row by row
        for number in range(len(self)):
            yield self._read(partial(next, rows), number)

    @property
    def format(self) -> str | None:
        """Return the name of the rows' format; None before the first row is read."""
        return self._reader.form.name

    def name_of(self, index: int) -> str:
        """Return how errors call a row: by its number and, where the source knows it, by its line."""
        line = getattr(self._rows, "line", None)
        if line is None:
            return super().name_of(index)
        return f"row {index} (the first is 0; line {line(self.numbers[index])} of the file)"

    def _made(self, number: int) -> Row:
        return self._read(partial(self._rows.__getitem__, number), number)

    def _read(self, take: Callable[[], Row], number: int) -> Row:
        """Take a row of the source, and read it. DataErrors name it."""
        try:
            row = take()
        except DataError as error:
            raise DataError(f"{self._reader.key}: {_where(number)}: {error}") from error
        return self._reader.read(row, _where(number))


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

    Rows may be parsed when they are taken: a large data set then costs the memory of its file, not of its objects.
    """
    key = key or f"data.{split}"
    path = None if config.path is None else expanded(config.path)
    source = installed_data_sources().get(config.source)
    is_here = path is not None and (path.is_file() or (path.is_dir() and source is not None and source.path == "file"))
    folder = path.parent if path is not None and is_here else None
    reader = RowReader(config=config, key=key, folder=folder, **form)
    is_own = config.source == "environment"
    if is_own and config.format not in (AUTO, OWN):
        expected = "no format: the environment makes rows in rlcore's own form"
        raise ConfigError(
            [Problem(path=f"{key}.format", found=f"{config.format!r}, with source = {config.source!r}", expected=expected)]
        )
    rows = _environment_rows(reader, split, environment, owner) if is_own else _source_rows(reader)
    if len(rows) == 0:
        where = f"the environment's {split!r} split" if config.path is None else f"{config.path}"
        limited = "" if config.limit is None else f" ({key}.limit is {config.limit})"
        raise DataError(f"{key}: found no rows in {where}{limited}; expected at least one")
    return rows


def _where(number: int) -> str:
    return f"row {number} (the first is 0)"


def _source_rows(reader: RowReader) -> SourceRows:
    """Read the rows of the section's source, and check what it returns."""
    config, key = reader.config, reader.key
    provider = installed_data_sources().get(config.source)
    if provider is None:  # before a run, the plan has refused it with the line that installs it
        raise DataError(f"{key}.source: the data source {config.source!r} is not installed")
    if not config.path:
        raise DataError(f"{key}.path: found nothing; expected the {provider.path} that {key}.source = {config.source!r} reads")
    path = expanded(config.path)
    if provider.path == "file" and not path.exists():
        raise DataError(f"{key}.path: found no file {path}; expected a {config.source} file. {similar_path(path)}".rstrip(". "))
    request = DataSourceRequest(
        path=str(path) if provider.path == "file" or path.exists() else config.path,
        key=key,
        limit=config.limit,
        subset=config.subset,
        split=config.split,
        prompt_field=config.prompt_field if reader.has_prompts and not reader.may_be_chats else None,
        check=reader.read,
    )
    owner = f"the data source {config.source!r}"
    times = TIMES if provider.path == "file" else _OF_NAMES
    with attributed("raised as it read rows:", owner), in_time(f"reading {config.path}, by {owner},", times):
        try:
            rows = read_rows(provider, request)
        except DataError as error:
            if config.source == "jsonl" and path.is_file() and _begins_list(path):
                raise DataError(f'{error}. Set {key}.source = "json" for a file that is one list (rlcore-datasets)') from error
            raise
        first = rows[0] if hasattr(rows, "__getitem__") and hasattr(rows, "__len__") and len(rows) else {}
    if not hasattr(rows, "__getitem__") or not hasattr(rows, "__len__"):
        raise ContractError(f"{owner} returned a {type(rows).__name__}; expected a sequence of rows")
    if not isinstance(first, Mapping):
        raise ContractError(f"{owner} returned rows of {type(first).__name__}; expected mappings of fields")
    if first:
        reader.require_prompt_field(list(reader.in_own_form(first, f"{config.path}")), f"{config.path}")
    return SourceRows(rows, reader)


def _begins_list(path: Path) -> bool:
    """Return whether the first character of a file begins a JSON list."""
    with path.open("rb") as file:
        return file.read(1024).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["


def _environment_rows(
    reader: RowReader, split: Split, environment: Environment | AgentEnvironment | None, owner: str
) -> Sequence[Row]:
    """Return the environment's rows, unchanged unless they are learned or the recipe names other fields."""
    config, key = reader.config, reader.key
    rows = None if environment is None else _rows_of(environment, split, owner)
    if rows is None:
        has = "the recipe names no environment" if environment is None else f"the environment brings no {split!r} rows"
        raise DataError(
            f'{key}.source: found "environment", but {has}. Name a data set: {key}.source = "jsonl", or another that '
            f"`rlcore plugins` lists, and {key}.path"
        )
    own = rows if config.limit is None else rows[: config.limit]
    if not reader.maps and not reader.is_learned:
        return own
    read = partial(_read_own, own, reader)
    return LazyRows(len(own), read, getattr(own, "level_of", None))


def _read_own(rows: Sequence[Row], reader: RowReader, number: int) -> Row:
    return reader.read(rows[number], f"row {number} (the first is 0)")


def _rows_of(environment: Environment | AgentEnvironment, split: Split, owner: str) -> Sequence[Row] | None:
    with attributed(f"raised in rows({split!r}) of", owner), in_time(f"rows({split!r}) of {owner}", TIMES):
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
