"""`rlcore import`: what is written, what is told, and who reads a library."""

import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from rlcore.cli.main import cli
from rlcore_import.command import recipe_text, summary
from rlcore_import.recipe import ImportedRecipe, Unmapped

FOUND = ImportedRecipe(
    values={"run.num_steps": 3, "algorithm.acme.beta": float("inf"), "model.path": "a"},
    unmapped=(
        Unmapped(key="x.y", value=[1, 2], why="no such loss", changes_meaning=True),
        Unmapped(key="z", value="text\nof lines", why="logs alone", changes_meaning=False),
    ),
    num_off=2,
)
SOURCE = """
from rlcore_import.recipe import ImportedRecipe

def import_recipe(path, overrides):
    return ImportedRecipe(values={"run.name": path.read_text().strip(), "run.seed": len(overrides)}, unmapped=())

def wrong(path, overrides):
    return {}
"""


def test_a_recipe_has_its_values_and_comments() -> None:
    text = recipe_text(FOUND, "acme recipe.yaml")
    found = tomllib.loads(text)
    assert found == {"run": {"num_steps": 3}, "algorithm": {"acme": {"beta": float("inf")}}, "model": {"path": "a"}}
    comments = [line for line in text.splitlines() if line.startswith("#")]
    assert "#   x.y = [1, 2]: no such loss" in comments
    assert any("z = " in line and line.endswith("logs alone") for line in comments)
    assert comments.index("#   x.y = [1, 2]: no such loss") < next(i for i, line in enumerate(comments) if "z = " in line)
    assert any("2 other keys" in line for line in comments)


def test_the_summary_counts() -> None:
    assert list(summary(FOUND))[-1] == "3 keys written; 2 without a counterpart, of which 1 change what is trained"


@pytest.fixture
def acme(installer) -> None:
    points = {"rlcore.importers": {"acme": "acme_importer:import_recipe", "wrong": "acme_importer:wrong"}}
    installer.add("acme-importer", points, acme_importer=SOURCE)


def test_the_installed_importer_reads_the_file(acme, tmp_path: Path) -> None:
    file, output = tmp_path / "theirs.yaml", tmp_path / "recipe.toml"
    file.write_text("good\n")
    result = CliRunner().invoke(cli, ["import", "acme", str(file), "a=1", "-o", str(output)])
    assert result.exit_code == 0, result.output
    assert tomllib.loads(output.read_text()) == {"run": {"name": "good", "seed": 1}}
    assert tomllib.loads(CliRunner().invoke(cli, ["import", "acme", str(file)]).stdout)["run"]["seed"] == 0


def test_a_file_that_is_there_stays(acme, tmp_path: Path) -> None:
    file = tmp_path / "theirs.yaml"
    file.write_text("good\n")
    for output in (file, tmp_path, tmp_path / "nowhere" / "recipe.toml"):
        result = CliRunner().invoke(cli, ["import", "acme", str(file), "-o", str(output)])
        assert result.exit_code == 2
        assert "--output: found" in result.output
    assert file.read_text() == "good\n"


@pytest.mark.parametrize(
    ("source", "code", "text"),
    [
        ("import no_such_library\n", 0, ""),
        ("import_recipe = None\n", 0, ""),
        (SOURCE, 3, "importer 'acme' is a duplicate name: acme-importer 1.0 and other-importer 1.0 provide it; keep one"),
    ],
)
def test_another_importer_of_the_name(installer, acme, tmp_path: Path, source: str, code: int, text: str) -> None:
    points = {"rlcore.importers": {"acme": "other_importer:import_recipe"}}
    installer.add("other-importer", points, other_importer=source)
    file = tmp_path / "theirs.yaml"
    file.write_text("good\n")
    result = CliRunner().invoke(cli, ["import", "acme", str(file)])
    assert (result.exit_code, text in result.output) == (code, True), result.output


def test_an_importer_that_cannot_be_imported_says_why(installer) -> None:
    installer.add("acme", {"rlcore.importers": {"acme": "gone_importer:read"}}, gone_importer="import no_such_library\n")
    result = CliRunner().invoke(cli, ["import", "acme", "file.yaml"])
    assert result.exit_code == 3
    assert "importer 'acme' is not usable: import failed in gone_importer, line 1: ModuleNotFoundError" in result.output


def test_a_library_that_nothing_reads_is_told(acme, tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["import", "nowhere", "file.yaml"])
    assert result.exit_code == 3
    assert "acme" in result.output
    result = CliRunner().invoke(cli, ["import", "wrong", str(tmp_path)])
    assert result.exit_code == 3
    assert "ImportedRecipe" in result.output
