"""`rlcore config`."""

from pathlib import Path

import click

from rlcore.cli.arguments import recipe_arguments


@click.command("config")
@recipe_arguments
def config_command(recipe: Path, overrides: tuple[str, ...]) -> None:
    """Print a recipe with every default.

    As TOML, merged with what it extends and overridden. It is checked as far as it can be without selecting plugins or
    looking at the model.
    """
    from rlcore.config.dump import dump_toml
    from rlcore.config.load import read_raw
    from rlcore.run.plan.sections import convert_recipe

    converted, registry = convert_recipe(read_raw(recipe, overrides))
    named = {"algorithm": converted.algorithm.name}
    if converted.environment is not None:
        named["environment"] = converted.environment.name
    observers = [entry.name for entry in registry.observer_entries if entry.is_global]
    click.echo(dump_toml(converted, named, observers), nl=False)
