"""Reads rows that a Python program passes: a sequence of mappings, or a data set of the package `datasets`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rlcore.config.data import DatasetConfig
from rlcore.registry.plugin_errors import described, in_time
from rlcore.run.data.mixes import CHUNK_ROWS, TIMES
from rlcore.spi import DataError, LazyRows, Row
from rlcore_text.chats.public_fields import names_of
from rlcore_text.formats.layout import LIST_COLUMNS
from rlcore_text.rows.arrow_nulls import cleaner
from rlcore_text.rows.row_fields import MAPPED, RowReader


class GivenRows(LazyRows):
    """The rows of a program, each in the core's form once it is taken."""

    def __init__(self, num_rows: int, make: Callable[[int], Row], reader: RowReader) -> None:
        super().__init__(num_rows, make)
        self._reader = reader

    @property
    def format(self) -> str | None:
        """Return the name of the rows' format; None before the first row is read."""
        return self._reader.form.name


def given_rows(rows: Sequence[Any] | None, config: DatasetConfig, key: str, **form: Any) -> LazyRows:
    """Read and check the rows of `[data.<split>]`; `form` are further fields of RowReader. DataError where there are none."""
    if rows is None:
        found = f'{key}.source: found "python", and no rows'
        raise DataError(f"{found}; expected those of a program: rlcore.train(recipe, dataset=…), also where a run is resumed")
    if not hasattr(rows, "__len__") or not hasattr(rows, "__getitem__"):
        raise DataError(f"{key}: found a {type(rows).__name__}; expected a sequence of rows, such as a list of dicts")
    reader = RowReader(config=config, key=key, **form)
    clean, read = _cleaner_of(rows), _columns_of(config)
    plain = _unformatted(rows)
    num_rows = len(rows) if config.limit is None else min(config.limit, len(rows))

    def make(number: int) -> Row:
        where = f"row {number} (the first is 0)"
        try:
            row = rows[number]
            if plain is not None and isinstance(row, Mapping):  # formats turn integers beside nulls into floats
                row = {**row, **{name: value for name, value in plain[number].items() if name in row and name in read}}
            row = clean(_with_lists(row, read))
        except RecursionError as error:
            raise DataError(f"{key}: {where}: found values that are nested too deeply; expected fewer levels") from error
        return reader.read(row, where)

    made = GivenRows(num_rows, make, reader)
    for start in range(0, num_rows, CHUNK_ROWS):
        with in_time(f"taking rows from {start} on of {key}", TIMES):
            for number in range(start, min(start + CHUNK_ROWS, num_rows)):
                _require_row(rows, number, key)
                made[number]
    if num_rows == 0:
        raise DataError(f"{key}: found no rows; expected at least one")
    return made


def _cleaner_of(rows: Any) -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
    """Return a function that removes filler nulls from rows, where the data set has an Arrow schema."""
    schema = getattr(getattr(rows, "features", None), "arrow_schema", None)
    return dict if schema is None else cleaner(schema, is_decoded=True)


def _unformatted(rows: Any) -> Any:
    """Return a data set of `datasets` without its format, such as "numpy"; None without one. A program's transform stays."""
    kind = found.get("type") if isinstance(found := getattr(rows, "format", None), Mapping) else None
    return None if kind in (None, "custom") else rows.with_format(None)


def _columns_of(config: DatasetConfig) -> frozenset[str]:
    """Return the columns that are read as texts, messages or tools."""
    mapped = (value for option in MAPPED if (value := getattr(config, option)) is not None)
    return frozenset({*names_of("row", "used"), *mapped, *LIST_COLUMNS})


def _with_lists(row: Mapping[str, Any], columns: frozenset[str]) -> dict[str, Any]:
    """Return a row with lists in place of the arrays of objects that pandas and `datasets` make of messages and tools, and None
    in place of pandas' nulls."""
    return {name: None if _is_null(value) else _as_list(value) if name in columns else value for name, value in row.items()}


def _is_null(value: object) -> bool:
    """Return whether a cell is NaN, NaT or pandas.NA, which pandas writes for null."""
    if type(value).__module__.startswith("pandas."):
        return type(value).__name__ in ("NaTType", "NAType")
    return isinstance(value, float | np.floating | np.datetime64 | np.timedelta64) and bool(value != value)


def _as_list(value: Any) -> Any:
    if isinstance(value, np.ndarray) and (value.dtype == object or value.ndim < 2):  # and no picture
        value = value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, list | tuple):
        return [_as_list(item) for item in value]
    return {name: _as_list(item) for name, item in value.items()} if isinstance(value, Mapping) else value


def _require_row(rows: Sequence[Any], number: int, key: str) -> None:
    where = f"row {number} (the first is 0)"
    try:
        row = rows[number]
    except Exception as error:  # a table of columns, which has no row 0
        raise DataError(f"{key}: {where} of a {type(rows).__name__} cannot be taken ({described(error)})") from error
    if not isinstance(row, Mapping):
        raise DataError(f"{key}: {where} is a {type(row).__name__}; expected a mapping of fields")
