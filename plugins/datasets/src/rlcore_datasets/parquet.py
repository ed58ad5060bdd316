"""Reads Parquet files."""

from pathlib import Path

import pyarrow as pa
from pyarrow import parquet

from rlcore.schema.file_limits import require_tree
from rlcore.spi import DataError, DataSourceRequest
from rlcore_datasets.arrow_rows import ArrowRows, checked


def _common_schema(folder: Path) -> pa.Schema:
    """Return the schema with the columns and fields of all files in a folder: pyarrow itself takes those of the first one."""
    files = parquet.ParquetDataset(folder).files
    return pa.unify_schemas([parquet.read_schema(file) for file in files], promote_options="permissive")


def read(request: DataSourceRequest) -> ArrowRows:
    """Read the rows of a Parquet file, or of a folder of them. DataError where it is none."""
    try:
        require_tree(path := Path(request.path))
        table = parquet.read_table(path, memory_map=True, schema=_common_schema(path) if path.is_dir() else None)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{request.key}.path: {request.path} does not read as Parquet: {error}") from error
    return checked(table, request)
