"""Reads Parquet files."""

from pathlib import Path

import pyarrow as pa
from pyarrow import parquet

from rlcore.schema.file_limits import require_tree
from rlcore.spi import DataError, DataSourceRequest
from rlcore_datasets.arrow_rows import ArrowRows, checked


def read(request: DataSourceRequest) -> ArrowRows:
    """Read the rows of a Parquet file, or of a folder of them. DataError where it is none."""
    try:
        require_tree(Path(request.path))
        table = parquet.read_table(request.path, memory_map=True)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{request.key}.path: {request.path} does not read as Parquet: {error}") from error
    return checked(table, request)
