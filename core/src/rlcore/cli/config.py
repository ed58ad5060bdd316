"""`rlcore config`."""

from pathlib import Path

import click


@click.command("config")
@click.argument("recipe", type=click.Path(path_type=Path), required=False)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--reference", is_flag=True, help="Print the reference of every key, as Markdown; takes no RECIPE.")
def config_command(recipe: Path | None, overrides: tuple[str, ...], reference: bool) -> None:
    """Print a recipe with every default.

    As TOML, merged with what it extends and overridden. It is checked as far as it can be without selecting plugins or
    looking at the model.
    """
    from rlcore.config.document import reference as reference_of
    from rlcore.config.dump import dump_toml
    from rlcore.config.load import read_raw
    from rlcore.registry.discovery import discover
    from rlcore.run.plan.sections import convert_recipe, sections

    if reference:
        if recipe is not None:
            raise click.UsageError("--reference takes no RECIPE.")
        click.echo(reference_of(sections(discover())), nl=False)
        return
    if recipe is None:
        raise click.UsageError("Missing argument 'RECIPE', or --reference.")
    converted, registry = convert_recipe(read_raw(recipe, overrides))
    named = {"algorithm": converted.algorithm.name}
    if converted.environment is not None:
        named["environment"] = converted.environment.name
    observers = [entry.name for entry in registry.observer_entries if entry.is_global]
    click.echo(dump_toml(converted, named, observers), nl=False)
