"""The directory of converted models; imports no torch."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rlcore.schema.file_limits import expanded
from rlcore.spi import Problem
from rlcore_torchkit.distributed.format_bytes import gib

OWN = "RLCORE_MEGATRON_CHECKPOINT_DIR"
HUB = "HF_HOME"
ELSEWHERE = f"Set {OWN} to another directory, or trainer.megatron.conversion_cache to false"


def cache_directory() -> Path:
    """The first of $RLCORE_MEGATRON_CHECKPOINT_DIR, $HF_HOME/rlcore and ~/.cache/huggingface/rlcore; it need not exist."""
    if own := os.environ.get(OWN):
        return expanded(own)
    return expanded(os.environ.get(HUB) or "~/.cache/huggingface") / "rlcore"


def directory_problems(directory: Path, needed_bytes: int | None) -> Iterator[Problem]:
    """Return whether a directory cannot be made or written to, or its file system lacks `needed_bytes` (None: not known)."""
    existing = next(parent for parent in (directory, *directory.absolute().parents) if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        where = "" if existing == directory else f", whose parent {existing} is where it would be made"
        yield Problem(
            path=_source(directory),
            found=f"{directory}{where}: {error.strerror or error}",
            expected="a directory that can be written to",
            remedy=ELSEWHERE,
        )
        return
    free = shutil.disk_usage(existing).free
    if needed_bytes is not None and free < needed_bytes:
        yield Problem(
            path=_source(directory),
            found=f"{directory} with {gib(free)} free",
            expected=f"{gib(needed_bytes)}, the size of the converted model",
            remedy=f"Free some, or: {ELSEWHERE}",
        )


def _source(directory: Path) -> str:
    """Return which setting named the directory."""
    if os.environ.get(OWN):
        return OWN
    return HUB if os.environ.get(HUB) else str(directory)
