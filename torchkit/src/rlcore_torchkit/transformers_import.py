"""Importing what transformers needs for models, and nothing besides."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module


@contextmanager
def without_torchao() -> Iterator[None]:
    """Let what is imported meanwhile take torchao for missing, unless it has been imported already.

    transformers and some engines import it wherever it is installed, whoever asks for it. That costs seconds and prints a
    warning for each of its libraries that does not fit this machine. Quantised models alone would notice that it is missing;
    who needs it can import it afterwards.
    """
    if "torchao" in sys.modules:
        yield
        return
    sys.modules["torchao"] = None  # type: ignore[assignment] # the import system's own way to say that there is none
    try:
        yield
    finally:
        del sys.modules["torchao"]


def import_transformers() -> None:
    """Import transformers' models without torchao."""
    if "transformers.modeling_utils" not in sys.modules:
        with without_torchao():
            import_module("transformers.modeling_utils")
