"""What devices there are, how much memory they have and what they can compute, found without a CUDA context or torch."""

import os
import subprocess

GIB = 2**30


def device_memories() -> list[int] | None:
    """Bytes of each visible NVIDIA device; None where nvidia-smi cannot tell."""
    found = _query("memory.total")
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
    """What nvidia-smi says of each visible device."""
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


def gib(num_bytes: float) -> str:
    """Bytes as people read them."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / 2**20:.1f} MiB"
