"""`rlcore`, and how much memory of each GPU was in use in each phase of the run, whoever used it.

    python phase_memory.py FILE train recipe.toml

FILE gets the largest GiB seen, by phase and device: {"train": [71.3, 71.2], ...}. The driver is asked five times a second.
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
from rlcore.run.report.timing import PhaseClock

QUERY = ("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits")
INTERVAL_S = 0.2
MIB_IN_GIB = 1024


class PhaseMemory:
    """Samples until the process ends."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._phases: list[str] = []
        """Those that are open, the innermost last."""
        self._most: dict[str, list[float]] = {}
        self._devices = [int(index) for index in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if index]

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
        while not pause.wait(INTERVAL_S):
            before = self._phases[-1:]
            lines = subprocess.run(QUERY, capture_output=True, text=True, check=True).stdout.split()
            if not before or before != self._phases[-1:]:
                continue  # a figure of one phase must not count for another
            used = [int(line) / MIB_IN_GIB for line in lines]
            used = [used[index] for index in self._devices] if self._devices else used
            most = self._most.get(before[0], [0.0] * len(used))
            self._most[before[0]] = [max(pair) for pair in zip(most, used, strict=True)]


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit("found too few arguments; expected FILE and a command of rlcore, such as: memory.json train recipe.toml")
    if shutil.which(QUERY[0]) is None:
        sys.exit(f"found no {QUERY[0]}; expected it, since the memory of GPUs is what it says")
    PhaseMemory(Path(sys.argv.pop(1))).start()
    main()
