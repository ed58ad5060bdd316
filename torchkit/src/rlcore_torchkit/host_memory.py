"""Memory of the host that a process keeps for its next step."""

import ctypes
import os

KEPT_BYTES = 2**30
"""Blocks up to this size are kept; larger ones, as of whole models, go back to the system."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""What mallopt(3) calls M_TRIM_THRESHOLD and M_MMAP_THRESHOLD."""


def keep_freed_memory() -> None:
    """Let the C library keep what this process frees, as allocators of devices do. It does nothing where that is not glibc, or
    where the environment says how it is to behave.

    Otherwise glibc gives each large tensor back to the system, which clears its pages when the next one touches them: an
    eighth of a train step on CPU.
    """
    if any(name.startswith("MALLOC_") for name in os.environ) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "gnu_get_libc_version"):
        library.mallopt(_TRIM_THRESHOLD, -1)
        library.mallopt(_MMAP_THRESHOLD, KEPT_BYTES)
