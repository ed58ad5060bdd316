"""`rlcore top`."""

import json
import time
from pathlib import Path

import click

PLAIN_WIDTH = 120
"""Characters of a line where no terminal says how many it has."""


@click.command("top")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--once", is_flag=True, help="Print one frame and end.")
@click.option("--json", "as_json", is_flag=True, help="Print one frame for programs and end.")
@click.option("--every", type=click.FloatRange(0.1, 3600), default=2.0, show_default=True, help="Seconds between two frames.")
def top_command(run: Path, once: bool, as_json: bool, every: float) -> None:
    """Show where the time and the memory of a run go, until it ends.

    RUN is a run directory, which may be on a shared folder: nothing but its files is read. Shown are phases, queues, engines,
    ranks, slow calls, failures and restarts.
    """
    from rich.console import Console
    from rich.live import Live

    from rlcore_report.status_command import finite
    from rlcore_report.top import frame_of
    from rlcore_report.top_view import view

    frame = frame_of(run)
    if as_json:
        click.echo(json.dumps(finite(frame.as_json()), indent=2, allow_nan=False))
        return
    console = Console()
    if not console.is_terminal:
        console = Console(width=PLAIN_WIDTH)
    if once or not console.is_terminal:
        console.print(view(frame, time.time()))
        return
    with Live(view(frame, time.time()), console=console, screen=True, auto_refresh=False) as live:
        while frame.state.state == "running":
            time.sleep(every)
            frame = frame_of(run)
            live.update(view(frame, time.time()), refresh=True)
    console.print(view(frame, time.time()))
