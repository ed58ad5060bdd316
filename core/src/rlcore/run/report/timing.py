"""Measures the seconds of each phase of a step."""

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rlcore.run.report.progress import Progress
from rlcore.run.report.timeline import DRIVER

STEP_PHASES = ("generation", "rewards", "logprobs", "train", "refit", "offload")
"""Parts of a step; what remains of its total is `other`."""


class PhaseClock:
    """Adds up wall-clock seconds by phase, per step and over the whole run, and tells the display what is happening."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._step: defaultdict[str, float] = defaultdict(float)
        self._step_start = time.perf_counter()
        self.totals: defaultdict[str, float] = defaultdict(float)
        """Seconds by phase over the whole run."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a block as phase `name`."""
        self._progress.phase(name)
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            self._step[name] += seconds
            self.totals[name] += seconds
            self._progress.span(DRIVER, name, start, (seconds,))

    def move(self, source: str, target: str, seconds: float) -> None:
        """Count some seconds of one phase as another's, which went on within it."""
        for counted in (self._step, self.totals):
            counted[source] -= seconds
            counted[target] += seconds

    def begin_step(self) -> None:
        """Start counting a step; what ran between two steps is in no step's figures."""
        self._step.clear()
        self._step_start = time.perf_counter()

    def end_step(self) -> dict[str, float]:
        """The step's `time/<phase>_s` metrics; `time/other_s` is what no phase covers."""
        total_s = time.perf_counter() - self._step_start
        metrics = {f"time/{name}_s": self._step[name] for name in STEP_PHASES}
        other_s = max(0.0, total_s - sum(metrics.values()))
        self.totals["other"] += other_s
        self.totals["total"] += total_s
        return {"time/total_s": total_s, **metrics, "time/other_s": other_s}


def idle_seconds(times: Mapping[str, float], generating_s: float | None) -> dict[str, float]:
    """Seconds of a step, given the metrics of `end_step`, in which the trainer computed nothing, and in which nothing was
    generated; the latter where `generating_s`, those in which something was, are known. Refits and moves are neither's work."""
    total_s = times["time/total_s"]
    idle = {"time/trainer_idle_s": max(0.0, total_s - times["time/train_s"] - times["time/logprobs_s"])}
    if generating_s is not None:
        idle["time/generator_idle_s"] = max(0.0, total_s - generating_s)
    return idle
