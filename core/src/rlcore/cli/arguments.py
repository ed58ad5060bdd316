"""Arguments that several commands share: a recipe, overrides, and the form of progress."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

Function = TypeVar("Function", bound=Callable[..., Any])


def recipe_arguments(function: Function) -> Function:
    """RECIPE and OVERRIDES. Whether the file can be read is for the recipe's loader to say."""
    function = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")(function)
    return click.argument("recipe", type=click.Path(path_type=Path))(function)


def progress_option(function: Function) -> Function:
    """Add the option --progress to a command."""
    return click.option(
        "--progress",
        "mode",
        type=click.Choice(["auto", "live", "plain", "silent"]),
        default="auto",
        show_default=True,
        help='How to show what happens; "auto" is live on a terminal and otherwise one plain line a step.',
    )(function)


def as_override(key: str, value: str) -> str:
    """KEY=VALUE whose value is this very string, whatever it looks like."""
    from rlcore.schema.describe import toml_literal

    return f"{key}={toml_literal(value)}"
