"""Importing what transformers needs for models, and nothing besides."""

import sys
from importlib import import_module


def import_transformers() -> None:
    """Import transformers' models without torchao, which they import wherever it is installed, whoever asks for it.

    That costs seconds and prints a warning for each of its libraries that does not fit this machine. transformers then takes it
    for missing, which quantised models alone would notice; who needs torchao can import it as before.
    """
    if "torchao" in sys.modules or "transformers.modeling_utils" in sys.modules:
        return
    sys.modules["torchao"] = None  # type: ignore[assignment] # the import system's own way to say that there is none
    try:
        import_module("transformers.modeling_utils")
    finally:
        del sys.modules["torchao"]
