"""Reads Parquet files."""

from pathlib import Path

import pyarrow as pa
from pyarrow import parquet

from rlcore.spi import DataError, DataSourceRequest
from rlcore_datasets.arrow_rows import ArrowRows, checked
from rlcore_datasets.regular_files import require_tree


def _common_schema(folder: Path) -> pa.Schema:
    """Return the schema with the columns and fields of all files in a folder: pyarrow itself takes those of the first one."""
    dataset = parquet.ParquetDataset(folder)
    found = [*map(parquet.read_schema, dataset.files), dataset.schema]  # the last one has the columns that folders' names hold
    return pa.unify_schemas([pa.schema(map(_plain, schema)) for schema in found], promote_options="permissive")


def _plain(field: pa.Field) -> pa.Field:
    """Return a field whose values are no numbers of a dictionary, as in files whose writers keep one."""
    return field.with_type(field.type.value_type) if pa.types.is_dictionary(field.type) else field


def read(request: DataSourceRequest) -> ArrowRows:
    """Read the rows of a Parquet file, or of a folder of them. DataError where it is none."""
    try:
        require_tree(path := Path(request.path))
        table = parquet.read_table(path, memory_map=True, schema=_common_schema(path) if path.is_dir() else None)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{request.key}.path: {request.path} does not read as Parquet: {error}") from error
    return checked(table, request)
