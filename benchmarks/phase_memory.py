"""`rlcore`, and how much memory of each GPU was in use in each phase of the run, whoever used it.

    python phase_memory.py FILE train recipe.toml

FILE gets the largest GiB seen, by phase and device: {"train": [71.3, 71.2], ...}. The driver is asked five times a second. On
a machine without a GPU the one figure of a phase is what this process holds of the machine's memory.
"""

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlcore.cli.main import main
from rlcore.gpu import detect_device
from rlcore.run.report.timing import PhaseClock

QUERY = ("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits")
INTERVAL_S = {"cuda": 0.2, "cpu": 0.01}
MIB_IN_GIB, GIB = 1024, 2**30


def used_gib(device: str) -> list[float]:
    """On each GPU that this process sees; without one, of the machine's memory."""
    if device == "cpu":
        resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
        return [resident_pages * os.sysconf("SC_PAGE_SIZE") / GIB]
    lines = subprocess.run(QUERY, capture_output=True, text=True, check=True).stdout.split()
    used = [int(line) / MIB_IN_GIB for line in lines]
    own = [int(index) for index in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if index]
    return [used[index] for index in own] or used


class PhaseMemory:
    """Samples until the process ends."""

    def __init__(self, file: Path, device: str) -> None:
        self._file, self._device = file, device
        self._phases: list[str] = []
        """Those that are open, the innermost last."""
        self._most: dict[str, list[float]] = {}

    def start(self) -> None:
        """Wrap the clock of the run, and sample from now on."""
        timed = PhaseClock.phase

        @contextmanager
        def phase(clock: PhaseClock, name: str) -> Iterator[None]:
            self._phases.append(name)
            try:
                with timed(clock, name):
                    yield
            finally:
                self._phases.pop()
                self._file.write_text(json.dumps(self._most))

        PhaseClock.phase = phase  # type: ignore[method-assign]
        threading.Thread(target=self._sample, daemon=True).start()

    def _sample(self) -> None:
        pause = threading.Event()
        while not pause.wait(INTERVAL_S[self._device]):
            before = self._phases[-1:]
            used = used_gib(self._device)
            if not before or before != self._phases[-1:]:
                continue  # a figure of one phase must not count for another
            most = self._most.get(before[0], [0.0] * len(used))
            self._most[before[0]] = [max(pair) for pair in zip(most, used, strict=True)]


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit("found too few arguments; expected FILE and a command of rlcore, such as: memory.json train recipe.toml")
    found = detect_device()
    if found == "cuda" and shutil.which(QUERY[0]) is None:
        sys.exit(f"found no {QUERY[0]}; expected it, since the memory of GPUs is what it says")
    PhaseMemory(Path(sys.argv.pop(1)), found).start()
    main()
