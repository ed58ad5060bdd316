"""Shows a run: live on a terminal, by one plain line a step elsewhere, with a report at the end."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar
from rich.text import Text

from rlcore.run.report.plain_progress import PlainProgress, describe_metrics, describe_times
from rlcore.run.report.progress import Progress
from rlcore.run.storage.run_directory import RunDirectory
from rlcore.schema.printable import printable
from rlcore.secrets import masked
from rlcore_report.run_report import run_report

REFRESHES_PER_S = 4
SPEED_WINDOW_S = 600.0
"""The remaining time is estimated from the steps of so many seconds past."""
BARS = "▁▂▃▄▅▆▇█"


def display(mode: str) -> Progress:
    """Return the display for "auto", "live" or "plain"; one that is a context manager is open while the run goes on."""
    console = Console()
    if mode == "live" or (mode == "auto" and console.is_terminal and not console.is_dumb_terminal):
        return LiveProgress(Console(force_terminal=True) if mode == "live" else console)
    return ReportedProgress()


class _History:
    """The metrics of the run, kept for the report."""

    def __init__(self) -> None:
        self.records: list[dict[str, float]] = []

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        self.records.append({"step": step, **metrics})

    def all_records(self, run_directory: Path | None) -> list[dict[str, float]]:
        """Return the records of all steps, also those before a resume."""
        if run_directory is None:
            return self.records
        return RunDirectory(path=run_directory).read_metrics() or self.records


class ReportedProgress(PlainProgress):
    """One line a step, and the report at the end."""

    def __init__(self) -> None:
        super().__init__()
        self._history = _History()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the step's line."""
        self._history.add(step, metrics)
        super().step(step, metrics)

    def finished(self, summary: Mapping[str, object]) -> None:
        """Print the report."""
        console = Console(width=100, color_system=None, file=None)
        with console.capture() as capture:
            console.print(run_report(summary, self._history.all_records(self.run_directory)))
        self.write(capture.get().rstrip())


class LiveProgress(Progress):
    """A progress bar, the present phase and the last step's figures, redrawn in place."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._history = _History()
        self._latest: dict[str, float] = {}
        self._pools: dict[str, str] = {}
        self._summary: Mapping[str, object] | None = None
        self._bar = ProgressBar(
            SpinnerColumn(),
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console,
            expand=True,
            speed_estimate_period=SPEED_WINDOW_S,
        )
        self._task = self._bar.add_task("set-up", total=None)
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=REFRESHES_PER_S, transient=True)

    def __enter__(self) -> "LiveProgress":
        self._live.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        # The report takes the bar's place; a run that ended early leaves its last state on the screen.
        self._live.transient = self._summary is not None
        self._live.__exit__(*exception)
        if self._summary is not None:
            records = self._history.all_records(self.run_directory)
            self._console.print(run_report(self._summary, records, width=self._console.width))

    def started(self, run_directory: Path, start_step: int, num_steps: int) -> None:
        """Show the bar."""
        super().started(run_directory, start_step, num_steps)
        self._console.print(Text.assemble("run directory ", (str(run_directory), "bold")))
        self._bar.reset(self._task, total=num_steps, completed=start_step)

    def phase(self, name: str) -> None:
        """Show the phase beside the bar."""
        self._bar.update(self._task, description=f"{name:<10}")

    def samples(self, num_finished: int, num_samples: int) -> None:
        """Show how many samples are there."""
        self._bar.update(self._task, description=f"generation {num_finished}/{num_samples}")

    def pool(self, name: str, doing: str) -> None:
        """Show what the pool does, below the figures."""
        self._pools[name] = doing

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Advance the bar and show the step's figures; those of the last evaluation stay."""
        self._history.add(step, metrics)
        self._latest = {**self._latest, **metrics}
        self._bar.update(self._task, completed=step)

    def note(self, text: str) -> None:
        """Print a warning above the bar."""
        self._console.print(Text.assemble(("warning: ", "yellow"), printable(masked(text))))

    def finished(self, summary: Mapping[str, object]) -> None:
        """Keep the summary until the bar is gone."""
        self._summary = summary

    def _render(self) -> RenderableType:
        lines: list[RenderableType] = [self._bar]
        metrics = Text("   ").join(
            Text.assemble((f"{label} ", "dim"), (value, "bold")) for label, value in describe_metrics(self._latest)
        )
        rewards = [record["reward_mean"] for record in self._history.records if "reward_mean" in record]
        if len(rewards) > 1:
            metrics.append_text(Text.assemble("   ", (sparkline(rewards, 30), "green")))
        lines += [Padding(metrics, (0, 2))] if metrics else []
        if self._pools:
            pools = Text("   ").join(Text.assemble((f"{name} ", "dim"), doing) for name, doing in dict(self._pools).items())
            lines.append(Padding(pools, (0, 2)))
        lines += [Padding(Text(text, style="dim"), (0, 2)) for text in describe_times(self._latest)]
        return Group(*lines)


def sparkline(values: Sequence[float], width: int) -> str:
    """The last `width` values as bars between their least and greatest."""
    shown = values[-width:]
    low, span = min(shown), max(shown) - min(shown)
    return "".join(BARS[int((value - low) / span * (len(BARS) - 1)) if span > 0 else 0] for value in shown)
