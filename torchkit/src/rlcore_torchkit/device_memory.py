"""How much memory devices have, found without a CUDA context; imports no torch."""

import os
import subprocess

GIB = 2**30


def device_memories() -> list[int] | None:
    """Bytes of each visible NVIDIA device; None where nvidia-smi cannot tell."""
    command = ["nvidia-smi", "--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
        rows = [[cell.strip() for cell in line.split(",")] for line in output.splitlines() if line.strip()]
        memories = {key: int(row[2]) * 2**20 for row in rows for key in row[:2]}
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [int(row[2]) * 2**20 for row in rows]
    found = []
    for name in (part.strip() for part in visible.split(",")):
        matching = [size for key, size in memories.items() if key == name or (not name.isdigit() and key.startswith(name))]
        if not name or not matching:
            break
        found.append(matching[0])
    return found


def gib(num_bytes: float) -> str:
    """Bytes as people read them."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / 2**20:.1f} MiB"
