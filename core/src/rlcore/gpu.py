"""Find this machine's GPUs, and the default device of a run, without a CUDA context or torch."""

import os
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Literal, TypeAlias

Device: TypeAlias = Literal["cpu", "cuda"]
_DRIVER_FILES = ("dev/nvidia[0-9]*", "proc/driver/nvidia/gpus/*", "dev/dxg")
"""Files of an NVIDIA driver: device nodes, its list of GPUs, and the GPU of a Windows Subsystem for Linux."""


def has_gpu(root: Path = Path("/")) -> bool:
    """Return whether a driver below `root` has a GPU that CUDA_VISIBLE_DEVICES does not hide."""
    hidden = _hides_all(os.environ.get("CUDA_VISIBLE_DEVICES"))
    return not hidden and any(True for pattern in _DRIVER_FILES for _ in root.glob(pattern))


def _hides_all(visible: str | None) -> bool:
    """Return whether CUDA_VISIBLE_DEVICES hides all devices. CUDA reads the list up to the first invalid entry."""
    if visible is None:
        return False
    first = visible.split(",")[0].strip()
    return first == "" or first.startswith("-") or first.lower() == "nodevfiles"


def detect_device(root: Path = Path("/")) -> Device:
    """Return "cuda" if a driver lists a visible GPU below `root` and torch is not a CPU-only build, else "cpu"."""
    return "cuda" if has_gpu(root) and not _torch_is_cpu_only() else "cpu"


def _torch_is_cpu_only() -> bool:
    """Return whether the installed torch was built without CUDA, by its version."""
    try:
        return "+cpu" in metadata.version("torch")
    except (metadata.PackageNotFoundError, ValueError):
        return False


def device_memories() -> list[int] | None:
    """Bytes of each visible NVIDIA device; None where nvidia-smi cannot tell."""
    return _memories("memory.total")


def free_memories() -> list[int] | None:
    """Bytes of each visible NVIDIA device that nothing has at the moment; None where nvidia-smi cannot tell."""
    return _memories("memory.free")


def _memories(field: str) -> list[int] | None:
    found = _query(field)
    try:
        return None if found is None else [int(text) * 2**20 for text in found]
    except ValueError:
        return None


def compute_capabilities() -> list[tuple[int, int]] | None:
    """Major and minor compute capability of each visible NVIDIA device; None where nvidia-smi cannot tell."""
    found = _query("compute_cap")
    try:
        parts = (text.partition(".") for text in found or ())
        return None if found is None else [(int(major), int(minor)) for major, _, minor in parts]
    except ValueError:
        return None


def _query(field: str) -> list[str] | None:
    """Return the output of nvidia-smi for each visible device."""
    command = ["nvidia-smi", f"--query-gpu=index,uuid,{field}", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
        rows = [[cell.strip() for cell in line.split(",")] for line in output.splitlines() if line.strip()]
        texts = {key: row[2] for row in rows for key in row[:2]}
    except (OSError, subprocess.SubprocessError, IndexError):
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [row[2] for row in rows]
    found = []
    for name in (part.strip() for part in visible.split(",")):
        matching = [text for key, text in texts.items() if key == name or (not name.isdigit() and key.startswith(name))]
        if not name or not matching:
            break
        found.append(matching[0])
    return found
