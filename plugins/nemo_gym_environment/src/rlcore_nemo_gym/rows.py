"""Rows of NeMo Gym's data sets: what a model is asked, beside what a verifier needs."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlcore.schema.file_limits import expanded, memory_bytes, read_file
from rlcore.spi import DataError, LazyRows, Row

PARAMS = "responses_create_params"
_FORM = f'{{"{PARAMS}": {{"input": …}}, …}}'


def read_rows(files: Sequence[str], key: str) -> Sequence[Row]:
    """Return the rows of JSONL files, one file after another, parsed as they are taken. DataError names the first line that is
    none."""
    lines: list[bytes] = []
    for file in files:
        try:
            content = read_file(expanded(file), memory_bytes())
        except OSError as error:
            raise DataError(f"{key}: cannot read {file}: {error.strerror or error}; expected a JSONL file") from error
        for number, line in enumerate(content.split(b"\n"), start=1):
            if line.strip():
                _require_row(line, f"{key}: {file}, line {number}")
                lines.append(line)
    if not lines:
        raise DataError(f"{key}: found no row in {', '.join(files)}; expected one JSON object a line, {_FORM}")
    return LazyRows(len(lines), lambda index: json.loads(lines[index]))


def params_of(row: Row) -> Mapping[str, Any]:
    """Return what a row asks of a model; the input may be empty, where the agent makes it. DataError where it asks nothing."""
    params = row.get(PARAMS)
    if not isinstance(params, Mapping):
        fields = ", ".join(map(repr, row)) or "none"
        raise DataError(f"found a row with the fields {fields}; expected one of NeMo Gym, {_FORM}")
    if not isinstance(params.get("metadata") or {}, Mapping):
        raise DataError(f"found the metadata {params['metadata']!r:.80} in a row's {PARAMS}; expected an object")
    return params


def agent_of(row: Row) -> str | None:
    """Return the name of the agent server that a row is for; None where it names none."""
    reference = row.get("agent_ref")
    name = reference.get("name") if isinstance(reference, Mapping) else None
    return name if isinstance(name, str) else None


def _require_row(line: bytes, where: str) -> None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is no JSON ({error}); expected {_FORM}") from error
    if not isinstance(row, dict):
        raise DataError(f"{where} holds a JSON {type(row).__name__}; expected {_FORM}")
    try:
        params_of(row)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
