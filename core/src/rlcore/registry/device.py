"""Which device a run uses by default, decided without importing torch."""

from importlib import metadata
from pathlib import Path
from typing import Literal, TypeAlias

from rlcore.gpu import has_gpu

Device: TypeAlias = Literal["cpu", "cuda"]


def detect_device(root: Path = Path("/")) -> Device:
    """ "cuda" where a driver shows a GPU below `root`, CUDA_VISIBLE_DEVICES hides it not, and torch can use it."""
    return "cuda" if has_gpu(root) and not _torch_is_cpu_only() else "cpu"


def _torch_is_cpu_only() -> bool:
    """Whether the installed torch says in its version that it was built without CUDA."""
    try:
        return "+cpu" in metadata.version("torch")
    except metadata.PackageNotFoundError:
        return False
