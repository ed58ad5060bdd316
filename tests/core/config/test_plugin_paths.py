"""Paths in plugins' sections start from the recipe that says them."""

from pathlib import Path
from typing import Any

import pytest
from attrs import frozen

from rlcore.config.convert import TABLES
from rlcore.config.load import read_raw
from rlcore.run.plan.sections import with_plugin_paths
from rlcore.schema.constraints import FileText, FunctionText, PathText


@frozen(kw_only=True)
class Config:
    """Options with paths."""

    function: FunctionText | tuple[FunctionText, ...] | None = None
    file: FileText | None = None
    other: PathText | None = None


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe's folder, beside the working directory `here`."""
    for file in ("recipes/own.py", "here/own.py", "here/only.py"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


def resolved(recipe: Path, *overrides: str, section: str = "environment.mine") -> dict[str, Any]:
    raw = read_raw(recipe, overrides)
    found: Any = with_plugin_paths(raw, {"environment": {"mine": Config}, TABLES: {"table": Config}}).values
    for part in section.split("."):
        found = found[part]
    return found  # type: ignore[no-any-return]


@pytest.mark.parametrize("section", ["environment.mine", "table"])
@pytest.mark.parametrize(
    ("key", "written", "found"),
    [
        ("function", "own.py:f", "{folder}/recipes/own.py:f"),
        (
            "function",
            ["own.py:f", "os.path:join"],
            ["{folder}/recipes/own.py:f", "os.path:join"],
        ),
        ("function", "gone.py:f", "{folder}/recipes/gone.py:f"),
        ("function", "only.py:f", "only.py:f"),
        ("function", "~no-such-user/x.py:f", "~no-such-user/x.py:f"),
        ("function", 3, 3),
        ("file", "gone.txt", "{folder}/recipes/gone.txt"),
        ("file", "../x.txt", "{folder}/x.txt"),
        ("file", "~no-such-user/x", "~no-such-user/x"),
        ("other", "own.py", "own.py"),
        ("unknown", "own.py", "own.py"),
    ],
)
def test_a_path_starts_from_the_recipe_where_its_type_says_so(
    folder: Path, section: str, key: str, written: Any, found: Any
) -> None:
    recipe = folder / "recipes" / "r.toml"
    recipe.write_text(f"[{section}]\n{key} = {written!r}\n")
    expected = [one.format(folder=folder) for one in found] if isinstance(found, list) else found
    assert resolved(recipe, section=section)[key] == (expected.format(folder=folder) if isinstance(expected, str) else expected)


def test_a_path_of_the_command_line_starts_from_here(folder: Path) -> None:
    recipe = folder / "recipes" / "r.toml"
    recipe.write_text('[environment.mine]\nfunction = "own.py:f"\n')
    assert resolved(recipe, "environment.mine.function=own.py:g")["function"] == f"{folder}/here/own.py:g"


def test_what_is_no_table_is_left_to_the_converter(folder: Path) -> None:
    recipe = folder / "recipes" / "r.toml"
    for text in ("environment = 3", "environment.mine = 3"):
        recipe.write_text(text)
        raw = read_raw(recipe, ())
        assert with_plugin_paths(raw, {"environment": {"mine": Config}}).values == raw.values
