"""Rows that a program hands over: a sequence of mappings, or a data set of the package `datasets`."""

from collections.abc import Mapping, Sequence
from typing import Any

from rlcore.config.data import DatasetConfig
from rlcore.run.data.row_fields import COMPLETION, PROMPT, no_such_field, prompt_fault
from rlcore.run.data.row_images import with_images
from rlcore.spi import DataError, LazyRows, Row


def given_rows(
    rows: Sequence[Any] | None,
    config: DatasetConfig,
    key: str,
    *,
    has_prompts: bool = True,
    may_be_chats: bool = False,
) -> LazyRows:
    """The rows of `[data.<split>]`, at least one and each checked. DataError where there are none, or one has no prompt where
    each `has_prompts`, unless it `may_be_chats` and is one."""
    if rows is None:
        found = f'{key}.source: found "python", and no rows'
        raise DataError(f"{found}; expected those of a program: rlcore.train(recipe, dataset=…), also where a run is resumed")
    if not hasattr(rows, "__len__") or not hasattr(rows, "__getitem__"):
        raise DataError(f"{key}: found a {type(rows).__name__}; expected a sequence of rows, such as a list of dicts")
    num_rows = len(rows) if config.limit is None else min(config.limit, len(rows))
    made = LazyRows(num_rows, lambda number: _named(rows[number], config))
    for number in range(num_rows):
        _check_row(rows, number, config, key, has_prompts, may_be_chats)
    if num_rows == 0:
        raise DataError(f"{key}: found no rows; expected at least one")
    return made


def _check_row(
    rows: Sequence[Any], number: int, config: DatasetConfig, key: str, has_prompts: bool, may_be_chats: bool
) -> None:
    where = f"row {number} (the first is 0)"
    try:
        row = rows[number]
    except Exception as error:  # a table of columns, which has no row 0
        raise DataError(
            f"{key}: {where} of a {type(rows).__name__} cannot be taken ({type(error).__name__}: {error})"
        ) from error
    if not isinstance(row, Mapping):
        raise DataError(f"{key}: {where} is a {type(row).__name__}; expected a mapping of fields")
    if not has_prompts or (may_be_chats and config.messages_field in row):
        return
    if config.prompt_field not in row:
        raise no_such_field(key, where, config.prompt_field, [str(name) for name in row])
    if fault := prompt_fault(_named(row, config)[PROMPT]):
        expected = 'text, or a list of chat messages {"role": …, "content": …}'
        raise DataError(f"{key}: {where}: the field {config.prompt_field!r} holds {fault}; expected {expected}")


def _named(row: Mapping[str, Any], config: DatasetConfig) -> Row:
    """The row with its prompt and completion under these names."""
    fields = ((PROMPT, config.prompt_field), (COMPLETION, config.completion_field))
    named = {**row, **{name: row[field] for name, field in fields if field in row}}
    return with_images(named, config, None)
