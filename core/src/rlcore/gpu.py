"""Whether this machine has a GPU that CUDA would show, found out from the driver's files; imports no torch."""

import os
from pathlib import Path

_DRIVER_FILES = ("dev/nvidia[0-9]*", "proc/driver/nvidia/gpus/*", "dev/dxg")
"""What an NVIDIA driver shows: device nodes, its list of GPUs, and the GPU of a Windows Subsystem for Linux."""


def has_gpu(root: Path = Path("/")) -> bool:
    """Whether a driver shows a GPU below `root` that CUDA_VISIBLE_DEVICES does not hide."""
    hidden = _hides_all(os.environ.get("CUDA_VISIBLE_DEVICES"))
    return not hidden and any(True for pattern in _DRIVER_FILES for _ in root.glob(pattern))


def _hides_all(visible: str | None) -> bool:
    """Whether CUDA_VISIBLE_DEVICES leaves no device: CUDA reads the list up to the first entry that is none."""
    if visible is None:
        return False
    first = visible.split(",")[0].strip()
    return first == "" or first.startswith("-") or first.lower() == "nodevfiles"
