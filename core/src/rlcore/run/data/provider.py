"""The entry point of the core's own data source."""

from rlcore.spi.data_source import DataSourceProvider

JSONL = DataSourceProvider(
    name="jsonl",
    spi=(2, 0),
    priority=20,
    read="rlcore.run.data.jsonl_rows:read",
    suffixes={".jsonl", ".json", ".ndjson"},
)
"""JSONL files: one JSON object a line."""
