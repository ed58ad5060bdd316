"""Arguments that several commands share."""

from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from rlcore.cli.arguments import as_override, progress_option, recipe_arguments
from rlcore.config.load import raw_from


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_a_value_is_overridden_by_this_very_text(text: str) -> None:
    assert raw_from({}, [as_override("run.name", text)]).values == {"run": {"name": text}}


@click.command
@recipe_arguments
@progress_option
def command(recipe: Path, overrides: tuple[str, ...], mode: str) -> None:
    click.echo(f"{recipe!r} {overrides} {mode}")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["not/there.toml"], "PosixPath('not/there.toml') () auto\n"),
        (["r.toml", "a.b=1", "--progress", "plain", "c=2"], "PosixPath('r.toml') ('a.b=1', 'c=2') plain\n"),
    ],
)
def test_a_recipe_is_followed_by_overrides(arguments: list[str], expected: str) -> None:
    assert CliRunner().invoke(command, arguments).output == expected


@pytest.mark.parametrize(("arguments", "found"), [([], "RECIPE"), (["r.toml", "--progress", "loud"], "loud")])
def test_what_cannot_be_is_a_usage_error(arguments: list[str], found: str) -> None:
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 2
    assert found in result.output
