"""Shows a run by one plain line a step."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from rlcore.published_plugins import remedy_for
from rlcore.run.report.progress import Progress
from rlcore.run.report.step_text import describe_metrics, describe_times
from rlcore.schema.printable import printable
from rlcore.secrets import masked


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
