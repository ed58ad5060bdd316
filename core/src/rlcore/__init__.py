"""rlcore: reinforcement-learning post-training of language models on any backend.

`train`, `evaluate`, `load` and `rows` are described in :mod:`rlcore.api` and docs/python.md, `open`, which another package
brings, in docs/own-loop.md. Importing this package imports no
torch and no transformers; what a plugin needs is in :mod:`rlcore.spi`.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"
__all__ = ["Run", "__version__", "evaluate", "load", "rows", "train"]


def __getattr__(name: str) -> Any:
    """Import the interface when it is first used: plugins import this package too, and need nothing of it."""
    if name in __all__:
        return getattr(import_module("rlcore.api"), name)
    if name == "open":  # not in __all__, where a star import would hide Python's own
        return import_module("rlcore.registry.run_parts").api_function(name)
    raise AttributeError(f"module 'rlcore' has no attribute {name!r}")
