"""Which device a run uses by default, decided without importing torch."""

import os
from importlib import metadata
from pathlib import Path
from typing import Literal, TypeAlias

Device: TypeAlias = Literal["cpu", "cuda"]

_DRIVER_FILES = ("dev/nvidia[0-9]*", "proc/driver/nvidia/gpus/*", "dev/dxg")
"""What an NVIDIA driver shows: device nodes, its list of GPUs, and the GPU of a Windows Subsystem for Linux."""


def detect_device(root: Path = Path("/")) -> Device:
    """ "cuda" where a driver shows a GPU below `root`, CUDA_VISIBLE_DEVICES hides it not, and torch can use it."""
    if _hidden(os.environ.get("CUDA_VISIBLE_DEVICES")) or _torch_is_cpu_only():
        return "cpu"
    return "cuda" if any(True for pattern in _DRIVER_FILES for _ in root.glob(pattern)) else "cpu"


def _hidden(visible: str | None) -> bool:
    """Whether CUDA_VISIBLE_DEVICES leaves no device: CUDA reads the list up to the first entry that is none."""
    if visible is None:
        return False
    first = visible.split(",")[0].strip()
    return first == "" or first.startswith("-") or first.lower() == "nodevfiles"


def _torch_is_cpu_only() -> bool:
    """Whether the installed torch says in its version that it was built without CUDA."""
    try:
        return "+cpu" in metadata.version("torch")
    except metadata.PackageNotFoundError:
        return False
