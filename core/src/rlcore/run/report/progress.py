"""Interface for displays of a run's progress. The training loop calls it."""

from collections.abc import Mapping, Sequence
from pathlib import Path


class Progress:
    """A run's events, in the driver's thread but for `samples`, `pool`, `span` and `note`: started first, finished last.

    A run that fails or is interrupted has no `finished`. Displays override what they show; the rest does nothing. They must not
    raise and must be quick: they are called inside the step.
    """

    run_directory: Path | None = None
    """The run directory; None before the run has started."""

    def started(self, run_directory: Path, start_step: int, num_steps: int) -> None:  # noqa: ARG002
        """The run begins, or with `start_step` > 0 (steps already done) continues, towards `num_steps`."""
        self.run_directory = run_directory

    def phase(self, name: str) -> None:
        """Show the phase that begins: "generation", "rewards", "logprobs", "train", "refit", "evaluation", "checkpoint", ..."""

    def samples(self, num_finished: int, num_samples: int) -> None:
        """Show the progress of the present generation. Called from any thread, and only by generators that can tell."""

    def pool(self, name: str, doing: str) -> None:
        """Show what a pool of workers does from now on: "trainer", "generator" or "reference", and "train_step on 8 ranks",
        ..., or "idle". Only runs on a cluster have pools. Called from any thread."""

    def span(self, role: str, name: str, start: float, seconds: Sequence[float]) -> None:
        """Something is over that began at `start`, by time.perf_counter(): a phase of the "driver", or a call of a pool, with
        the seconds of each of its ranks. Called from any thread."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Figures of step `step`, from 1; `step` 0 carries those of the evaluation before the first step."""

    def note(self, text: str) -> None:
        """A warning, one line. Called from any thread."""

    def finished(self, summary: Mapping[str, object]) -> None:
        """The run is complete; `summary` holds what summary.json does."""
