"""Arrow's filler nulls: a struct has all fields that any struct of its column has, null where it was written without one.

The schema says which nulls are fillers. Those of a struct are, at any depth, and are left out, as they would be in JSON; Arrow
keeps no other trace of a null that was written there. Nulls in lists, maps and columns of JSON were written, and stay.
"""

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import pyarrow as pa

Clean: TypeAlias = Callable[[Any], Any]


def cleaner(schema: pa.Schema) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """What makes a row of a table of this schema into what it was before it was written. Columns that are null stay."""
    columns = {field.name: clean for field in schema if (clean := _clean_of(field.type)) is not None}

    def clean_row(row: Mapping[str, Any]) -> dict[str, Any]:
        return {name: columns[name](value) if name in columns else value for name, value in row.items()}

    return clean_row


def _clean_of(kind: pa.DataType) -> Clean | None:
    """What is done to the values of a type; None where nothing is."""
    if getattr(kind, "extension_name", "") == "arrow.json":
        return lambda value: json.loads(value) if isinstance(value, str) else value
    if isinstance(kind, pa.BaseExtensionType):
        return _clean_of(kind.storage_type)
    if pa.types.is_dictionary(kind):
        return _clean_of(kind.value_type)
    if pa.types.is_struct(kind):
        fields = {kind.field(index).name: _clean_of(kind.field(index).type) for index in range(kind.num_fields)}
        return partial(_clean_struct, fields=fields)
    if pa.types.is_map(kind):
        return partial(_clean_map, clean=_clean_of(kind.item_type))
    if pa.types.is_nested(kind) and hasattr(kind, "value_type"):  # a list of any kind
        item = _clean_of(kind.value_type)
        return None if item is None else partial(_clean_list, clean=item)
    return None


def _clean_struct(value: Any, fields: Mapping[str, Clean | None]) -> Any:
    if not isinstance(value, Mapping):  # a data set of `datasets` may have decoded it, as it does images
        return value
    present = {name: field for name, field in value.items() if field is not None}
    return {name: field if (clean := fields.get(name)) is None else clean(field) for name, field in present.items()}


def _clean_list(value: Any, clean: Clean) -> Any:
    return [clean(item) for item in value] if isinstance(value, list) else value


def _clean_map(value: Any, clean: Clean | None) -> Any:
    """A map as an object, where its keys are texts."""
    if not isinstance(value, list) or not all(isinstance(pair, tuple) and isinstance(pair[0], str) for pair in value):
        return value
    return {key: item if clean is None else clean(item) for key, item in value}
