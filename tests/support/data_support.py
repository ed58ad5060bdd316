"""Data sets of files, as a recipe reads them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rlcore.config.data import DatasetConfig
from rlcore.spi import Row
from rlcore_text.rows.datasets import load_rows


def require_source(source: str) -> None:
    """Skip the test where its data source is not installed, as in a venv with the core alone."""
    if source not in ("environment", "python", "jsonl"):
        pytest.importorskip("rlcore_datasets")


def rows_of_file(source: str, path: Path | str, **options: Any) -> Sequence[Row]:
    """The rows that `[data.train]` takes from a file; `options` are further keys of that section."""
    require_source(source)
    return load_rows(DatasetConfig(source=source, path=str(path), **options), "train", None)
