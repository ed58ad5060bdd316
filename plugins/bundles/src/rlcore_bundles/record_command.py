"""`rlcore record`: one step of a run as a bundle."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from rlcore_bundles.recording import record

MIB = 2**20
SHOWN = 5


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--step", type=int, required=True, help="The step, counted from 1.")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="The bundle's folder, a new one.")
@click.option(
    "--weights",
    type=click.Choice(["none", "model", "state"]),
    default="model",
    show_default=True,
    help="The weights at the beginning of the step: none, the model, or the optimizer's state too.",
)
@click.option(
    "--prompts",
    type=click.Choice(["kept", "hashed", "left-out"]),
    default="kept",
    show_default=True,
    help="The prompts: as they are, their hashes alone, or none. Without them no model can compute the step again.",
)
def record_command(run: Path, overrides: Sequence[str], step: int, output: Path, weights: Any, prompts: str) -> None:
    """Write one step of a run to a bundle.

    The step is computed again from the checkpoint before it in RUN, a run directory, and its figures are compared with those of
    the run. KEY=VALUE overrides the recipe, such as a secret that recipe.toml leaves out.
    """
    form: Any = prompts.replace("-", " ")
    found = record(run, step, output, overrides, weights=weights, prompts=form, tell=lambda text: click.echo(text, err=True))
    click.echo(f"{output}: step {step}, {found.num_bytes / MIB:.1f} MiB, with {_weights(weights)}")
    if not found.differing:
        click.echo(f"It repeats the run: {found.num_equal} figures are equal to the last bit.")
        return
    click.echo(f"It does not repeat the run in {len(found.differing)} of {len(found.differing) + found.num_equal} figures:")
    for name, (before, after) in list(found.differing.items())[:SHOWN]:
        click.echo(f"  {name}: {before:.9g} in metrics.jsonl, {after:.9g} here")


def _weights(weights: str) -> str:
    return {"none": "no weights", "model": "the model", "state": "the model and the optimizer's state"}[weights]
