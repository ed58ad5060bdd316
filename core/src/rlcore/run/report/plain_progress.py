"""Shows a run by one plain line a step, with its figures in words."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from rlcore.published_plugins import remedy_for
from rlcore.run.report.progress import Progress
from rlcore.run.report.timing import STEP_PHASES
from rlcore.schema.printable import printable
from rlcore.secrets import masked

STEP_METRICS = {
    "eval/pass@1": ("pass@1", "{:.3f}"),
    "reward_mean": ("reward", "{:.3f}"),
    "eval/loss": ("held-out loss", "{:.4f}"),
    "loss": ("loss", "{:.4f}"),
    "response_length_mean": ("length", "{:.1f}"),
    "speculative/mean_acceptance_length": ("acceptance length", "{:.2f}"),
    "entropy": ("entropy", "{:.3f}"),
    "grad_norm": ("grad norm", "{:.3f}"),
}
"""Metrics worth a place in a step's line, with their label and format."""


def describe_metrics(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """(label, value) of what the metrics hold; the loss only where there is no reward, since with one it says little."""
    shown = {name: style for name, style in STEP_METRICS.items() if name in metrics}
    if "reward_mean" in metrics:
        shown.pop("loss", None)
    return [(label, style.format(metrics[name])) for name, (label, style) in shown.items()]


def describe_times(metrics: Mapping[str, float]) -> list[str]:
    """One text on where the step's seconds went and the tokens per second; none where there are no times."""
    if "time/total_s" not in metrics:
        return []
    parts = {name: metrics.get(f"time/{name}_s", 0.0) for name in (*STEP_PHASES, "other")}
    shown = ", ".join(f"{name} {seconds:.2f}" for name, seconds in parts.items() if seconds >= 0.005)
    text = f"{metrics['time/total_s']:.2f} s" + (f" ({shown})" if shown else "")
    speed = metrics.get("tokens_per_second")
    return [text if speed is None else f"{text}  {speed:,.0f} tokens/s"]


class PlainProgress(Progress):
    """One line a step, for logs."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._reader_gone = False

    def started(self, run_directory: Path, start_step: int, num_steps: int) -> None:
        """Say where results go and which steps are to come."""
        super().started(run_directory, start_step, num_steps)
        self._num_steps = num_steps
        steps = f"steps {start_step + 1} to {num_steps}" if start_step < num_steps else "no step is left"
        self.write(f"run directory {run_directory}; {steps}")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the step's line."""
        parts = [f"{label} {value}" for label, value in describe_metrics(metrics)]
        self.write("  ".join([f"step {step}/{self._num_steps}", *parts, *describe_times(metrics)]))

    def note(self, text: str) -> None:
        """Print a warning."""
        self.write(f"warning: {printable(masked(text))}")

    def finished(self, summary: Mapping[str, object]) -> None:
        """Print where the run is, and what shows more of it."""
        self.write(
            f"run directory: {summary.get('run_directory', '')}. No report of it is shown. {remedy_for('display')}".rstrip()
        )

    def write(self, text: str) -> None:
        """Print a text. A run does not end because no one reads its log any more (`rlcore train ... | head`)."""
        if self._reader_gone:
            return
        try:
            print(text, flush=True)
        except BrokenPipeError:
            self._reader_gone = True
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
