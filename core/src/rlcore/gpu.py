"""Whether this machine has a GPU, and which device a run uses by default, from the driver's files; imports no torch."""

import os
from importlib import metadata
from pathlib import Path
from typing import Literal, TypeAlias

Device: TypeAlias = Literal["cpu", "cuda"]
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


def detect_device(root: Path = Path("/")) -> Device:
    """Return "cuda" if a driver lists a visible GPU below `root` and torch is not a CPU-only build, else "cpu"."""
    return "cuda" if has_gpu(root) and not _torch_is_cpu_only() else "cpu"


def _torch_is_cpu_only() -> bool:
    """Whether the installed torch says in its version that it was built without CUDA."""
    try:
        return "+cpu" in metadata.version("torch")
    except metadata.PackageNotFoundError:
        return False
