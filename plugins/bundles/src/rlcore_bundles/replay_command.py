"""`rlcore replay`: a bundle's step computed again."""

from collections.abc import Sequence
from pathlib import Path

import attrs
import click

from rlcore_bundles.difference import first_difference
from rlcore_bundles.json_output import json_text
from rlcore_bundles.layout import layout_overrides
from rlcore_bundles.replay import Replay, replay
from rlcore_bundles.rows import table
from rlcore_bundles.storage import read_bundle

DIFFERS = 1
"""The exit code where a quantity differs by more than rounding."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--trainer", help="The trainer, such as fsdp2; by default the best that is installed.")
@click.option("--layout", help="The trainer on several ranks, such as fsdp2:ranks=2,tensor_parallel=2. Needs rlcore-ray.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), help="The device; by default the one that is there.")
@click.option("--dtype", help="The dtype of the model; by default the recorded one.")
@click.option("--weights", type=click.Path(path_type=Path), help="The model at the beginning of the step.")
@click.option("--no-rewards", is_flag=True, help="Do not ask the environment again.")
@click.option("--json", "as_json", is_flag=True, help="Print the comparison as JSON.")
def replay_command(
    bundle: Path,
    overrides: Sequence[str],
    trainer: str | None,
    layout: str | None,
    device: str | None,
    dtype: str | None,
    weights: Path | None,
    no_rewards: bool,
    as_json: bool,
) -> None:
    """Compute a bundle's step again, and name the first difference.

    KEY=VALUE overrides the recipe, as with `rlcore train`. The exit code is 1 where a quantity differs by more than rounding.
    """
    named = {"trainer.name": trainer, "run.device": device, "model.dtype": dtype}
    given = [f"{key}={value}" for key, value in named.items() if value is not None]
    given += [] if layout is None else layout_overrides(layout)
    found = replay(
        read_bundle(bundle),
        [*given, *overrides],
        weights=weights,
        rewards=not no_rewards,
        tell=lambda text: click.echo(text, err=True),
    )
    if as_json:
        click.echo(json_text(attrs.asdict(found)))
    else:
        click.echo("\n".join(lines_of(found)))
    if first_difference(found.rows) is not None:
        click.get_current_context().exit(DIFFERS)


def lines_of(found: Replay) -> list[str]:
    """The comparison as a table, and its result in a sentence."""
    lines = table("quantity", found.rows)
    first = first_difference(found.rows)
    if first is None:
        rounded = any(row.verdict == "rounding" for row in found.rows)
        return [*lines, "", f"Nothing differs by more than rounding{'' if rounded else ': every number is equal'}."]
    return [*lines, "", f"The first that differs is {first.quantity}: {first.where}."]
