"""`rlcore diff`: where two runs begin to differ."""

from collections.abc import Iterator
from pathlib import Path

import attrs
import click

from rlcore_bundles.json_output import json_text
from rlcore_bundles.own_difference import lines_of, own_difference
from rlcore_bundles.run_difference import RunDifference, run_difference

SHOWN = 8


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("first", type=click.Path(path_type=Path))
@click.argument("second", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the differences as JSON.")
def diff_command(first: Path, second: Path, as_json: bool) -> None:
    """Name the step, the figure and the token where two runs begin to differ.

    FIRST and SECOND are run directories, or bundles that sessions wrote. Figures of seconds and memory do not count. The exit
    code is 1 where the two part.
    """
    if (own := own_difference(first, second)) is not None:
        click.echo(json_text(attrs.asdict(own)) if as_json else "\n".join(lines_of(own)))
        if own.first is not None:
            click.get_current_context().exit(1)
        return
    found = run_difference(first, second)
    click.echo(json_text(attrs.asdict(found)) if as_json else "\n".join(_lines(found, first, second)))
    if found.step is not None or found.sample is not None:
        click.get_current_context().exit(1)


def _lines(found: RunDifference, first: Path, second: Path) -> Iterator[str]:
    if found.changes:
        yield "different:"
        yield from (f"  {change}" for change in found.changes)
    if found.step is None:
        yield f"All figures of {found.num_steps} steps are equal to the last bit."
    else:
        yield f"The runs part at step {found.step} of the {found.num_steps} that both have:"
        for figure in found.figures[:SHOWN]:
            yield f"  {figure.name}: {figure.first:.9g} and {figure.second:.9g}"
        if len(found.figures) > SHOWN:
            yield f"  and {len(found.figures) - SHOWN} other figures"
    if found.sample is not None:
        sample = found.sample
        where = "" if sample.place is None else f" at {sample.place}"
        yield (
            f"The first saved sample that differs is number {sample.sample} of step {sample.step}, in {sample.column}{where}: "
            f"{sample.first!r:.60} and {sample.second!r:.60}"
        )
    if found.step is not None:
        yield f"rlcore report {first} {second} draws both in one plot."
