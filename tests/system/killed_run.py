"""A training that is killed at random moments and resumed until it is done, and what it must have left behind."""

import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

import psutil
from attrs import define, field

Victim = Literal["driver", "worker"]
RLCORE = "from rlcore.cli.main import main; main()"
MARK = "RLCORE_KILLED_RUN"
"""An environment variable of all processes of a run."""
GONE_S = 120.0
"""Most seconds until all processes of a driver that was killed have ended. A node's agent of Ray may wait one of them for the
cluster's head to answer, which is dead by then."""
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
            with self._started() as process:
                while process.poll() is None and self.kills.total() < num_kills:
                    self._await_moment(process, draws)
                    if process.poll() is None and self._kill(process, draws) == "driver":
                        process.wait()
                ended_by = process.wait(END_S)
            self._await_end_of_all()
        assert (ended_by, self.kills.total()) == (0, num_kills), (self.folder / "output").read_text()[-3000:]

    @contextmanager
    def _started(self) -> Iterator[subprocess.Popen[bytes]]:
        resume = ["--resume"] if self.directory.exists() else []
        command = [sys.executable, "-c", RLCORE, "train", *self.arguments, *resume]
        self.num_starts += 1
        with (self.folder / "output").open("ab") as output:
            process = subprocess.Popen(
                command, cwd=self.folder, stdout=output, stderr=output, env=os.environ | {MARK: self.mark}
            )
            try:
                yield process
            finally:
                process.kill()
                process.wait()

    def _await_moment(self, process: subprocess.Popen[bytes], draws: random.Random) -> None:
        """Wait for a step or two and a little longer, or for a while that may end before them."""
        is_early = draws.random() < 0.25
        end = time.monotonic() + (draws.uniform(0, START_S) if is_early else PROGRESS_S)
        num_left, before = draws.choice([1, 2]), self._last_step()
        while num_left and time.monotonic() < end and process.poll() is None:
            time.sleep(0.02)
            step = self._last_step()
            num_left -= step > before
            before = step
        assert is_early or not num_left or process.poll() is not None, f"no step in {PROGRESS_S} s"
        time.sleep(draws.uniform(0, 0.5))

    def _last_step(self) -> int:
        """By the whole lines of metrics.jsonl, which a resumed run sets back; -1 where it has none."""
        file = self.directory / "metrics.jsonl"
        lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
        return int(json.loads(lines[-1])["step"]) if lines else -1

    def _kill(self, process: subprocess.Popen[bytes], draws: random.Random) -> Victim:
        """The driver, or one of the workers: trainer, generator, their engines."""
        workers = [own for own in self._processes() if own.pid != process.pid and _is_worker(own)]
        victim: Victim = "worker" if workers and draws.random() < 0.4 else "driver"
        with suppress(psutil.NoSuchProcess):
            (draws.choice(sorted(workers, key=lambda own: own.pid)) if victim == "worker" else process).kill()
        self.kills[victim] += 1
        print(f"kill {self.kills.total()}: a {victim}, behind step {self._last_step()}", flush=True)
        return victim

    def _processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def _await_end_of_all(self) -> None:
        """Nothing outlives a driver."""
        end = time.monotonic() + GONE_S
        while left := self._processes():
            assert time.monotonic() < end, f"still there: {[process.cmdline() for process in left]}"
            time.sleep(0.1)


def _is_worker(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        command = " ".join(process.cmdline())
        return command.startswith("ray::Worker") or "rlcore_vllm" in command
    return False
