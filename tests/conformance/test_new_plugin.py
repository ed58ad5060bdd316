"""`rlcore new-plugin`: what it writes and what it refuses. tests/system/test_new_plugin.py uses what it writes."""

import ast
import tomllib

import pytest
from click.testing import CliRunner

from rlcore.cli.main import cli
from rlcore.spi import ENTRY_POINT_GROUPS, SPI_VERSION
from rlcore_conformance.cli.new_plugin import DEPENDENCIES as ROLES
from rlcore_conformance.cli.new_plugin import package_files

MAX_LINES_OF_CODE = 100


def lines_of_code(text):
    """How many lines do something: no blank ones, comments, docstrings or imports."""
    lines = {number for number, line in enumerate(text.splitlines(), 1) if line.strip() and not line.strip().startswith("#")}
    for node in ast.walk(ast.parse(text)):
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if docstring or isinstance(node, ast.Import | ast.ImportFrom):
            lines -= set(range(node.lineno, node.end_lineno + 1))
    return len(lines)


def refused(*arguments):
    result = CliRunner().invoke(cli, ["new-plugin", *arguments])
    assert result.exit_code == 2
    return result.stderr


@pytest.mark.parametrize("role", ROLES)
def test_the_code_is_short(role):
    files = package_files(role, "two_words")
    code = {path: text for path, text in files.items() if path.startswith("src/")}
    assert set(code) == {f"src/rlcore_two_words/{name}.py" for name in ("__init__", "provider", "backend")}
    assert 10 < sum(map(lines_of_code, code.values())) <= MAX_LINES_OF_CODE


@pytest.mark.parametrize("role", ROLES)
def test_the_name_is_everywhere(role):
    files = package_files(role, "two_words")
    project = tomllib.loads(files["pyproject.toml"])["project"]
    assert project["name"] == "rlcore-two-words"
    assert project["entry-points"] == {ENTRY_POINT_GROUPS[role]: {"two_words": "rlcore_two_words.provider:PROVIDER"}}
    assert "rlcore" in project["dependencies"]
    provider = files["src/rlcore_two_words/provider.py"]
    assert f"spi={SPI_VERSION}" in provider
    assert 'backend="rlcore_two_words.backend:TwoWords"' in provider
    assert "class TwoWords:" in files["src/rlcore_two_words/backend.py"]
    for placeholder in ("newplugin", "NewPlugin", "ROLE", "DEPENDENCIES", "RECIPE_KEY", "DEMO_ARGUMENTS"):
        assert not [path for path, text in files.items() if placeholder in text]


def test_it_is_written_into_a_folder_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli, ["new-plugin", "sink", "mine"])
    assert result.exit_code == 0, result.output
    assert "pip install -e 'rlcore-mine[test]'" in result.output
    written = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert written == {f"rlcore-mine/{path}" for path in package_files("sink", "mine")}


@pytest.mark.parametrize("name", ["Mine", "my-own", "2nd", "a__b", "auto", "class", ""])
def test_names_that_are_none_are_refused(name, tmp_path):
    folder = tmp_path / "new"
    assert f"NAME: found {name!r}; expected lower-case letters" in refused("sink", name, "--directory", str(folder))
    assert not folder.exists()


@pytest.mark.parametrize("role", ROLES)
def test_names_that_hold_the_templates_own_are_whole(role):
    files = package_files(role, "my_newplugin")
    assert tomllib.loads(files["pyproject.toml"])["project"]["name"] == "rlcore-my-newplugin"
    text = "\n".join(files.values())
    assert "rlcore_my_newplugin.provider" in text
    assert "class MyNewplugin:" in text
    assert "my_my" not in text
    assert "my-my" not in text


@pytest.mark.parametrize(("role", "name"), [("sink", "none"), ("environment", "observation"), ("trainer", "safetensor_error")])
def test_names_whose_class_is_something_else_are_refused(role, name, tmp_path):
    assert f"NAME: found {name!r}, whose class would be" in refused(role, name, "--directory", str(tmp_path / "x"))


def test_all_problems_are_told_at_once(tmp_path, installer):
    installer.trainer("swift")
    message = refused("trainer", "swift", "--directory", str(tmp_path))
    assert "found 'swift', the trainer of acme-swift, which is installed" in message
    assert f"found {tmp_path}, which exists" in message


def test_a_package_that_is_there_is_not_shadowed(tmp_path, installer):
    installer.add("rlcore-mine", {}, rlcore_mine="")
    assert "whose package would be rlcore_mine, which is installed" in refused(
        "sink", "mine", "--directory", str(tmp_path / "x")
    )


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    result = CliRunner().invoke(cli, ["new-plugin", "sink", "mine", "--directory", str(tmp_path / "file" / "new")])
    assert result.exit_code == 11
    assert "cannot be written" in result.stderr
