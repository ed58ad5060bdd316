"""Reads data sets of the Hugging Face Hub."""

from pathlib import Path

from rlcore.spi import DataError, DataSourceRequest
from rlcore_datasets.arrow_rows import ArrowRows, checked
from rlcore_datasets.regular_files import require_tree


def read(request: DataSourceRequest) -> ArrowRows:
    """Load a data set by its name on the Hub, or a directory of the same form. DataError where it does not load."""
    from datasets import load_dataset

    split = request.split or "train"
    try:
        if Path(request.path).exists():
            require_tree(Path(request.path))
        dataset = load_dataset(request.path, name=request.subset, split=split)
    except Exception as error:  # not found, no such split or subset, offline, damaged files: each a class of its own
        subset = "" if request.subset is None else f", subset {request.subset!r}"
        named = f"the data set {request.path!r} (split {split!r}{subset})"
        raise DataError(f"{request.key}.path: {named} does not load: {type(error).__name__}: {error}") from error
    return checked(dataset.data.table, request)
