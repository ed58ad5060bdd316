"""Importing what transformers needs for models, and nothing besides."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from traceback import walk_tb

from rlcore.spi.errors import PluginError

MODULES = ("transformers.modeling_utils", "transformers.processing_utils")
"""Modules that all models of transformers import."""
HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
"""torch reads this variable once, when a process makes its first CPU tensor, and only Linux heeds it."""


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
    """Import what transformers' models need, without torchao. PluginError where something of it cannot be imported.

    Unless the environment says otherwise, torch asks for huge pages behind CPU tensors of 2 MiB and more: with pages of 4 KiB a
    GRPO step on two cores takes about 5% longer.
    """
    os.environ.setdefault(HUGE_PAGES, "1")
    if MODULES[-1] in sys.modules:
        return
    try:
        with without_torchao():
            for name in MODULES:
                import_module(name)
    except Exception as error:  # packages that do not fit fail with errors of any kind
        raise PluginError(f"transformers cannot be imported: {type(error).__name__}: {error}. {_remedy(error)}") from error


def _remedy(error: Exception) -> str:
    """Return what mends an import: without packages that text models do not need, where one of these failed."""
    modules = {str(frame.f_globals.get("__name__")).partition(".")[0] for frame, _ in walk_tb(error.__traceback__)}
    for name in ("torchvision", "torchaudio"):
        if name in modules:
            return f"Run: pip uninstall {name}, which models of text do not need; or install the {name} of this torch"
    return "`rlcore doctor` lists what does not fit together"
