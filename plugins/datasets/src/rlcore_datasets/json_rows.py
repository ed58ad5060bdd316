"""Rows of a JSON file that is one list of objects."""

import json
from pathlib import Path
from typing import Any, NoReturn

from rlcore.reading import read_text_file
from rlcore.schema.file_limits import unique_keys
from rlcore.schema.printable import lone_surrogate
from rlcore.spi import DataError, DataSourceRequest

_EXPECTED = "expected one list of objects"


def read(request: DataSourceRequest) -> list[dict[str, Any]]:
    """Read and check the rows of a JSON file. The DataError names the first item that is no row."""
    path, key = request.path, request.key
    try:
        found = json.loads(read_text_file(Path(path), key), parse_constant=_refuse_constant, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        hint = f'Where each line is an object, set {key}.source = "jsonl"'
        raise DataError(f"{key}.path: {path} is no JSON ({error}); {_EXPECTED}. {hint}") from error
    if not isinstance(found, list):
        raise DataError(f"{key}.path: {path} holds a JSON {type(found).__name__}; {_EXPECTED}")
    rows = found[: request.limit]
    for number, row in enumerate(rows):
        where = f"{path}, item {number} (the first is 0)"
        if not isinstance(row, dict):
            raise DataError(f"{key}.path: {where} is a JSON {type(row).__name__}; {_EXPECTED}")
        text = json.dumps(row, ensure_ascii=False)
        fault = "a NUL character" if "\\u0000" in text else lone_surrogate(text)
        if fault:
            raise DataError(f"{key}.path: {where} holds {fault}; expected Unicode text")
        request.check(row, where)
    return rows


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")
