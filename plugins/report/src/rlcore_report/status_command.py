"""`rlcore status`."""

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rlcore.schema.printable import printable

if TYPE_CHECKING:
    from rlcore_report.run_state import RunState


@click.command("status")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@click.pass_context
def status_command(context: click.Context, run: Path, as_json: bool) -> None:
    """Say what a run is doing, or how it ended.

    RUN is a run directory. The exit code is 0 while the run goes on and once it is complete; that of the run where it failed or
    was stopped; 1 where its process is gone without a word.
    """
    from attrs import asdict

    from rlcore.run.storage.run_directory import RunDirectory
    from rlcore.run.storage.saved_run import SavedRun
    from rlcore_report.run_state import run_state

    state = run_state(RunDirectory(path=SavedRun.find(run).path))
    if as_json:
        status = None if state.status is None else asdict(state.status)
        told = {
            "state": state.state,
            "exit_code": state.exit_code,
            "left_s": state.left_s,
            "status": status,
            "last": state.last,
        }
        click.echo(json.dumps(finite(told), indent=2, allow_nan=False))
    else:
        for line in lines_of(state, time.time()):
            click.echo(printable(line))
    context.exit(state.exit_code)


def lines_of(state: "RunState", now: float) -> Iterator[str]:
    """Return the printed text for a time in seconds since 1970."""
    from rlcore.run.report.plain_progress import describe_metrics, describe_times

    status = state.status
    yield f"{state.state}{f': {state.owner}' if state.owner else ''}"
    if status is not None:
        steps = f"{status.step} of {status.num_steps} steps done" if status.num_steps else "before its first step"
        since = f"{duration(now - status.phase_since)}"
        yield f"{steps}, {status.phase} for {since}" if state.state == "running" else f"{steps}, {since} ago"
        if status.step_s is not None:
            left = "" if state.left_s is None else f", {duration(state.left_s)} left"
            yield f"{status.step_s:.3g} s a step{left}"
    elif state.last:
        yield f"step {state.last['step']:.0f}"
    figures = [f"{label} {value}" for label, value in describe_metrics(state.last)]
    yield from filter(None, ["  ".join(figures), *describe_times(state.last)])
    if state.error is not None:
        yield f"error (exit code {state.error.exit_code}): {state.error.message}"
    if state.state == "killed":
        yield "The process is gone, and said nothing of its end. --resume continues from the newest checkpoint."


def finite(value: Any) -> Any:
    """Return a value of JSON with null in place of each NaN and infinity."""
    if isinstance(value, dict):
        return {name: finite(each) for name, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def duration(seconds: float) -> str:
    """Seconds in the two units that matter, such as "2 h 05 min"."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    hours, minutes = whole // 3600, whole % 3600 // 60
    return f"{hours} h {minutes:02} min" if hours < 48 else f"{hours // 24} d {hours % 24:02} h"
