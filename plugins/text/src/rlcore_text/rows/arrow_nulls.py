"""Removes the nulls that Arrow adds to rows.

Arrow gives each struct all fields that any struct of its column has, and null for those that the row was written without. The
schema says which nulls are such fillers: all nulls in fields of structs, at any depth. A null that was written there cannot be
told apart from a filler. Nulls in lists, maps and columns of JSON were written, and stay.
"""

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from rlcore.spi.errors import DataError

Clean: TypeAlias = Callable[[Any], Any]


def cleaner(schema: pa.Schema, *, is_decoded: bool = False) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Return a function that removes filler nulls from a row of a table of this schema, and parses its JSON unless it
    `is_decoded`. Columns that are null stay."""
    columns = {field.name: clean for field in schema if (clean := _clean_of(field.type, is_decoded)) is not None}

    def clean_row(row: Mapping[str, Any]) -> dict[str, Any]:
        return {name: columns[name](value) if name in columns else value for name, value in row.items()}

    return clean_row


def _clean_of(kind: pa.DataType, is_decoded: bool) -> Clean | None:
    """Return the function that cleans values of a type; None where they need none."""
    if getattr(kind, "extension_name", "") == "arrow.json":
        return None if is_decoded else _parse
    if isinstance(kind, pa.BaseExtensionType):
        return _clean_of(kind.storage_type, is_decoded)
    if pa.types.is_dictionary(kind):
        return _clean_of(kind.value_type, is_decoded)
    if pa.types.is_struct(kind):
        fields = {kind.field(index).name: _clean_of(kind.field(index).type, is_decoded) for index in range(kind.num_fields)}
        return partial(_clean_struct, fields=fields)
    if pa.types.is_map(kind):
        return partial(_clean_map, clean=_clean_of(kind.item_type, is_decoded))
    if pa.types.is_nested(kind) and hasattr(kind, "value_type"):  # a list of any kind
        item = _clean_of(kind.value_type, is_decoded)
        return None if item is None else partial(_clean_list, clean=item)
    return None


def _parse(value: Any) -> Any:
    """Parse a value of a column of JSON."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise DataError(f"found {value!r:.60} in a column of JSON; expected JSON ({error})") from error


def _clean_struct(value: Any, fields: Mapping[str, Clean | None]) -> Any:
    if not isinstance(value, Mapping):  # a data set of `datasets` may have decoded it, as it does images
        return value
    present = {name: field for name, field in value.items() if field is not None}
    return {name: field if (clean := fields.get(name)) is None else clean(field) for name, field in present.items()}


def _clean_list(value: Any, clean: Clean) -> Any:
    is_list = isinstance(value, list) or (isinstance(value, np.ndarray) and value.dtype == object)
    return [clean(item) for item in value] if is_list else value


def _clean_map(value: Any, clean: Clean | None) -> Any:
    """Return a map as a dict, where its keys are texts."""
    if not isinstance(value, list) or not all(isinstance(pair, tuple) and isinstance(pair[0], str) for pair in value):
        return value
    return {key: item if clean is None else clean(item) for key, item in value}
