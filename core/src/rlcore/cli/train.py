"""`rlcore train`."""

from pathlib import Path

import click

from rlcore.cli.arguments import as_override, progress_option, recipe_arguments


@click.command("train")
@recipe_arguments
@click.option("--resume", is_flag=True, help="Continue the run in its directory from the newest checkpoint.")
@click.option("--allow-changes", is_flag=True, help="With --resume: also where the recipe makes another run of it.")
@click.option(
    "--replay-schedule",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Repeat the steps of a run whose generation ran ahead, as its schedule.jsonl has them, with nothing at the same time.",
)
@click.option("--directory", type=click.Path(path_type=Path), help="Folder of the run directory, as run.directory.")
@click.option("--name", help="Name of the run directory, as run.name.")
@progress_option
@click.pass_context
def train_command(
    context: click.Context,
    recipe: Path,
    overrides: tuple[str, ...],
    resume: bool,
    allow_changes: bool,
    replay_schedule: Path | None,
    directory: Path | None,
    name: str | None,
    mode: str,
) -> None:
    """Train a model.

    RECIPE says what and how. KEY=VALUE overrides a key of the recipe with a TOML value: training.prompts_per_step=8.

    Ctrl-C saves a checkpoint and stops; the same command with --resume continues. A second Ctrl-C stops at once.
    """
    from rlcore.cli.display import open_display
    from rlcore.run.plan.prepare import prepare, require_device
    from rlcore.run.train import train

    if allow_changes and not resume:
        raise click.UsageError("--allow-changes is for --resume: a new run has no recipe that could have changed.")
    options = {"run.directory": directory, "run.name": name}
    extra = [as_override(key, str(value)) for key, value in options.items() if value is not None]
    prepared = prepare(recipe, [*overrides, *extra], continues=resume, replay_schedule=replay_schedule)
    require_device(prepared)
    with open_display(mode, context.find_root().meta) as progress:
        train(prepared, resume=resume, progress=progress, allow_changes=allow_changes)
