"""The machine: Python, system, processors, memory, GPUs, and the environment variables that change a run."""

import os
import platform
import re
import subprocess
import sys
from contextlib import suppress
from typing import Any

from rlcore.gpu import has_gpu

_VARIABLES = re.compile(
    r"(RLCORE|CUDA|NVIDIA|NCCL|TORCH|PYTORCH|HF|TRANSFORMERS|VLLM|RAY|OMP|MKL|NVTE|TRITON)_.*|PYTHONPATH|LD_LIBRARY_PATH|VIRTUAL_ENV"
)
_FIELDS = ("name", "memory.total", "driver_version", "compute_cap")


def machine() -> dict[str, Any]:
    """Return what is known of the machine without importing a library."""
    return {
        "python": {
            "version": platform.python_version(),
            "implementation": platform.python_implementation(),
            "prefix": sys.prefix,
            "is_virtual": sys.prefix != sys.base_prefix,
        },
        "system": {
            "platform": platform.platform(),
            "machine": platform.machine(),
            "processors": os.cpu_count(),
            "memory_gib": _memory_gib(),
        },
        "gpus": gpus(),
        "variables": {name: value for name, value in sorted(os.environ.items()) if _VARIABLES.fullmatch(name)},
    }


def _memory_gib() -> float | None:
    with suppress(ValueError, OSError):
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    return None


def gpus() -> list[dict[str, str]]:
    """Return name, memory, driver and compute capability of each NVIDIA GPU, by nvidia-smi."""
    command = ["nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return [{"name": "a GPU that nvidia-smi does not describe"}] if has_gpu() else []
    rows = [[cell.strip() for cell in line.split(",")] for line in output.splitlines() if line.strip()]
    return [dict(zip(_FIELDS, row, strict=False)) for row in rows]
