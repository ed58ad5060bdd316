"""Rows of a JSONL file."""

import json
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from rlcore.config.data import DatasetConfig
from rlcore.run.data.jsonl_line import parse_line
from rlcore.run.data.row_fields import COMPLETION, PROMPT, no_such_field, prompt_fault
from rlcore.run.data.row_images import with_images
from rlcore.run.data.text_file import read_text_file
from rlcore.schema.homes import expanded
from rlcore.spi import DataError, LazyRows, Row
from rlcore.spi.arrays import Int64Array


class JsonlRows(LazyRows):
    """The lines of a JSONL file, parsed as they are taken."""

    def __init__(self, lines: bytes, bounds: Int64Array, config: DatasetConfig) -> None:
        """`bounds` int64 [N, 2]: first and last-plus-one byte of each row in `lines`."""
        super().__init__(len(bounds), partial(_parsed, lines, bounds, config))
        self._lines, self._bounds = lines, bounds

    def line(self, index: int) -> int:
        """The number of a row's line in the file, from 1."""
        return self._lines.count(b"\n", 0, int(self._bounds[self.numbers[index], 0])) + 1


def jsonl_rows(
    path: Path, config: DatasetConfig, key: str, *, has_prompts: bool = True, may_be_chats: bool = False
) -> JsonlRows:
    """The rows of a file, all of them checked. DataError names the first line that is no row, or has no prompt where each
    `has_prompts`, unless it `may_be_chats` and is one."""
    content = read_text_file(path, key)
    bounds: list[tuple[int, int]] = []
    start = 0
    for number, line in enumerate(BytesIO(content), start=1):
        if config.limit is not None and len(bounds) >= config.limit:
            break
        if line.strip():
            _check_line(line, f"{path}, line {number}", config, key, has_prompts, may_be_chats)
            bounds.append((start, start + len(line)))
        start += len(line)
    return JsonlRows(content, np.asarray(bounds, np.int64).reshape(-1, 2), config)


def _check_line(line: bytes, where: str, config: DatasetConfig, key: str, has_prompts: bool, may_be_chats: bool) -> None:
    try:
        row = parse_line(line)
    except ValueError as error:
        raise DataError(f"{key}.path: {where} {error}") from error
    if not has_prompts or (may_be_chats and config.messages_field in row):
        return
    if config.prompt_field not in row:
        raise no_such_field(key, where, config.prompt_field, list(row))
    prompt = with_images(dict(row), config, None)[config.prompt_field]
    if fault := prompt_fault(prompt):
        raise DataError(
            f"{key}: {where}: the field {config.prompt_field!r} holds {fault}; expected text, or a list of chat messages "
            '{"role": …, "content": …}'
        )


def _parsed(lines: bytes, bounds: Int64Array, config: DatasetConfig, number: int) -> Row:
    start, end = bounds[number].tolist()
    row: dict[str, Any] = json.loads(lines[start:end])
    for name, field_name in ((PROMPT, config.prompt_field), (COMPLETION, config.completion_field)):
        if field_name != name and field_name in row:
            row[name] = row[field_name]
    return with_images(row, config, _folder(config))


def _folder(config: DatasetConfig) -> Path | None:
    """Where relative paths of images begin."""
    return None if config.path is None else expanded(config.path).parent
