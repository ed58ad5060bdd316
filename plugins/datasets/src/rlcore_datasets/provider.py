"""The entry points of the data sources, which import neither pyarrow nor `datasets`."""

from importlib.util import find_spec

from rlcore.spi import DataSourceProvider


def _hub_unavailable() -> str | None:
    missing = find_spec("datasets") is None
    return "`datasets` is not installed: pip install 'rlcore-datasets[hub]'" if missing else None


CSV = DataSourceProvider(name="csv", spi=(2, 0), priority=20, read="rlcore_datasets.csv_rows:read", suffixes={".csv"})
"""CSV files, whose first line names the columns; every field is text."""
JSON = DataSourceProvider(name="json", spi=(2, 0), priority=10, read="rlcore_datasets.json_rows:read", suffixes={".json"})
"""JSON files that are one list of objects."""
PARQUET = DataSourceProvider(
    name="parquet", spi=(2, 0), priority=20, read="rlcore_datasets.parquet:read", suffixes={".parquet", ".pq"}
)
"""Parquet files."""
HUGGINGFACE = DataSourceProvider(
    name="huggingface",
    spi=(2, 0),
    priority=20,
    read="rlcore_datasets.hub:read",
    path="name",
    keys={"subset", "split"},
    unavailable=_hub_unavailable,
)
"""Data sets on the Hugging Face Hub, and directories of the same form."""
