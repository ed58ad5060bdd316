"""Prompts of a JSONL file, as they are."""

from pathlib import Path

from rlcore.run.data.jsonl_line import parse_line
from rlcore.spi import DataError, Row
from rlcore.text_file import read_text_file


def read_prompts(path: Path) -> list[Row]:
    """The rows of a file, one JSON object a line. DataError names the line that is none."""
    rows: list[Row] = []
    for number, line in enumerate(read_text_file(path, "data.train").splitlines(), 1):
        if not line.strip():
            continue
        try:
            rows.append(parse_line(line))
        except ValueError as error:
            raise DataError(f"{path}, line {number}: {error}") from error
    if not rows:
        raise DataError(f"{path}: found no row; expected one JSON object a line")
    return rows
