"""Binding a worker to the cores near its GPU, as nvidia-smi and the system name them: no dependency of the core brings NVML."""

import os
import subprocess
from pathlib import Path

_QUERY_S = 30.0


def bind_near(gpu_ids: tuple[str, ...], devices: Path = Path("/sys/bus/pci/devices")) -> frozenset[int]:
    """Bind this process, and what it will start, to the cores of the GPUs' NUMA nodes; nothing changes where these are unknown
    or none of them is allowed. `gpu_ids` are numbers or UUIDs as nvidia-smi knows them. Returns the cores it may use."""
    allowed = os.sched_getaffinity(0)
    near: set[int] = set()
    for gpu in gpu_ids:
        near |= _cores_near(gpu, devices) & allowed
    if near:
        os.sched_setaffinity(0, near)
    return frozenset(near or allowed)


def _cores_near(gpu: str, devices: Path) -> set[int]:
    command = ["nvidia-smi", f"--id={gpu}", "--query-gpu=pci.bus_id", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_QUERY_S, check=True)
        # The system writes four digits of the domain, nvidia-smi eight.
        address = result.stdout.strip().lower()[-12:]
        return parse_cores((devices / address / "local_cpulist").read_text())
    except (OSError, subprocess.SubprocessError, ValueError):
        return set()


def parse_cores(text: str) -> set[int]:
    """The cores of a list such as 0-3,8."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores
