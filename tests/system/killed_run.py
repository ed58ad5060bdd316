"""A training that is killed at random moments and resumed until it is done, and what it must have left behind."""

import random
import signal
import subprocess
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

import psutil
from attrs import define, field

from .run_processes import await_end_of_all, last_step, marked, role, started

Victim = Literal["driver", "worker"]
START_S = 30.0
"""Kills that do not wait for a step come within as many seconds."""
PROGRESS_S = 240.0
"""Most seconds to wait for a step."""
END_S = 900.0
"""Most seconds for all steps behind the last kill."""


@define(kw_only=True)
class KilledRun:
    """`rlcore train` in a process of its own, one kill after another."""

    folder: Path
    """Where it is started."""
    arguments: Sequence[str]
    directory: Path
    """The run's."""
    seed: int
    mark: str = field(factory=lambda: uuid.uuid4().hex)
    kills: Counter[Victim] = field(factory=Counter)
    num_starts: int = 0

    def run(self, num_kills: int) -> None:
        """Kill and resume it so many times, then let it come to its end. A driver only ever ends since it is killed."""
        draws, ended_by = random.Random(self.seed), -signal.SIGKILL
        while ended_by == -signal.SIGKILL:
            resume = ["--resume"] if self.directory.exists() else []
            self.num_starts += 1
            with started(self.folder, [*self.arguments, *resume], self.mark) as process:
                while process.poll() is None and self.kills.total() < num_kills:
                    self._await_moment(process, draws)
                    if process.poll() is None and self._kill(process, draws) == "driver":
                        process.wait()
                ended_by = process.wait(END_S)
            await_end_of_all(self.mark)
        assert (ended_by, self.kills.total()) == (0, num_kills), (self.folder / "output").read_text()[-3000:]

    def _await_moment(self, process: subprocess.Popen[bytes], draws: random.Random) -> None:
        """Wait for a step or two and a little longer, or for a while that may end before them."""
        is_early = draws.random() < 0.25
        end = time.monotonic() + (draws.uniform(0, START_S) if is_early else PROGRESS_S)
        num_left, before = draws.choice([1, 2]), last_step(self.directory)
        while num_left and time.monotonic() < end and process.poll() is None:
            time.sleep(0.02)
            step = last_step(self.directory)
            num_left -= step > before
            before = step
        assert is_early or not num_left or process.poll() is not None, f"no step in {PROGRESS_S} s"
        time.sleep(draws.uniform(0, 0.5))

    def _kill(self, process: subprocess.Popen[bytes], draws: random.Random) -> Victim:
        """The driver, or one of the workers: trainer, generator, their engines."""
        workers = [own for own in marked(self.mark) if role(own, process.pid) in ("rank", "engine")]
        victim: Victim = "worker" if workers and draws.random() < 0.4 else "driver"
        with suppress(psutil.NoSuchProcess):
            (draws.choice(workers) if victim == "worker" else process).kill()
        self.kills[victim] += 1
        print(f"kill {self.kills.total()}: a {victim}, behind step {last_step(self.directory)}", flush=True)
        return victim
