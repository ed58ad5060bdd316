"""`rlcore trace`."""

import json
import re
from pathlib import Path

import click

NUM_STEPS = 5
"""The last so many steps are shown unless some are named."""


@click.command("trace")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--steps", metavar="FIRST..LAST", help=f"The steps, such as 3..5 or 3; by default the last {NUM_STEPS}.")
@click.option("-o", "--output", type=click.Path(path_type=Path), default="trace.json", show_default=True, help="The file.")
def trace_command(run: Path, steps: str | None, output: Path) -> None:
    """Write the timeline of some steps for ui.perfetto.dev.

    RUN is a run directory. The driver's phases and the calls of each worker stand above each other, with their seconds.
    """
    from rlcore.files import NAMED_OUTPUT, write_atomically
    from rlcore.run.report.timing import read_timeline
    from rlcore.run.storage.saved_run import SavedRun
    from rlcore.spi import CheckpointError
    from rlcore_report.chrome_trace import chrome_trace

    wanted = None if steps is None else parse_steps(steps)
    spans = read_timeline(SavedRun.find(run).path / "timeline.jsonl")
    if not spans:
        raise CheckpointError(f"{run} has no timeline; expected timeline.jsonl, which a run writes with its first step")
    last = max(span.step for span in spans)
    first, final = wanted or (last - NUM_STEPS + 1, last)
    shown = [span for span in spans if first <= span.step <= final]
    if not shown:
        least = min(span.step for span in spans)
        raise click.UsageError(f"--steps: found {steps}; expected some of {least} to {last}, the steps of the run")
    write_atomically(output, json.dumps(chrome_trace(shown)), NAMED_OUTPUT)
    told = sorted({span.step for span in shown})
    click.echo(f"steps {told[0]} to {told[-1]}: {output}, to open in https://ui.perfetto.dev or chrome://tracing")


def parse_steps(text: str) -> tuple[int, int]:
    """First and last step of "3..5", or of "3". click.UsageError where the text is neither."""
    match = re.fullmatch(r"([0-9]+)(?:\.\.([0-9]+))?", text)
    if match is None or int(match[1]) > int(match[2] or match[1]):
        raise click.UsageError(
            f"--steps: found {text!r}; expected two steps such as 3..5, the first one before the last, or one"
        )
    return int(match[1]), int(match[2] or match[1])
