"""Checks of `[environment.harbor]`: each problem is named at its key."""

import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rlcore.cli.main import cli
from rlcore_harbor.check import check
from rlcore_torchkit.testing.models import make_model

from .trials import LOCAL, ONE_ANSWER, PYTHON, REAL, config_of, write_task


def interpreter(folder: Path, version: str | None = None) -> str:
    """Write an interpreter without packages, or with a package `harbor` of a version that has no code."""
    packages = folder / "packages"
    if version is not None:
        (packages / "harbor").mkdir(parents=True)
        (packages / "harbor" / "__init__.py").touch()
        (packages / f"harbor-{version}.dist-info").mkdir()
        (packages / f"harbor-{version}.dist-info" / "METADATA").write_text(f"Name: harbor\nVersion: {version}\n")
    file = folder / "python"
    file.write_text(f'#!/bin/sh\nPYTHONPATH={packages} exec {sys.executable} -S "$@"\n')
    file.chmod(0o700)
    return str(file)


def found(tmp_path: Path, **options: Any) -> dict[str, str]:
    folder = tmp_path / "tasks"
    if not folder.exists():
        write_task(folder / "a")
    return {
        problem.path.removeprefix("environment.harbor."): problem.found for problem in check(None, config_of(folder, **options))
    }


def test_an_interpreter_without_harbor_is_a_problem(tmp_path: Path) -> None:
    [(path, reason)] = found(tmp_path, python=interpreter(tmp_path)).items()
    assert path == "python"
    assert "has no Harbor" in reason


@pytest.mark.parametrize("version", ["0.25.3", "0.9"])
def test_an_old_version_is_a_problem(tmp_path: Path, version: str) -> None:
    [(path, reason)] = found(tmp_path, python=interpreter(tmp_path, version)).items()
    assert path == "python"
    assert f"has Harbor {version}" in reason


def test_an_interpreter_that_is_none_is_a_problem(tmp_path: Path) -> None:
    assert set(found(tmp_path, python="/no/such/python")) == {"python"}
    [reason] = found(tmp_path, python="/bin/false").values()
    assert "exit code 1" in reason


def test_problems_of_folders_and_variables_are_found_at_once(tmp_path: Path) -> None:
    missing, empty = str(tmp_path / "missing"), tmp_path / "empty"
    empty.mkdir()
    options = {"tasks": missing, "evaluation_tasks": str(empty), "pass_environment": ("RLCORE_UNSET",)}
    expected = {"tasks", "evaluation_tasks", "pass_environment", "python"}
    assert set(found(tmp_path, python="/no/such/python", **options)) == expected


@REAL
def test_what_harbor_can_run_has_no_problem(tmp_path: Path) -> None:
    assert found(tmp_path) == {}


@REAL
def test_harbor_refuses_agents_environments_and_tasks(tmp_path: Path) -> None:
    tasks = [write_task(tmp_path / "tasks" / name) for name in ("a", "b", "c", "d")]
    (tasks[1] / "tests" / "test.sh").unlink()
    (tasks[2] / "instruction.md").write_text(" \n")
    (tasks[3] / "task.toml").write_text("[agent")
    options = {"agent": "no-such-agent", "environment": "no-such-environment"}
    problems = check(None, config_of(tmp_path / "tasks", **options))
    assert [problem.path.removeprefix("environment.harbor.") for problem in problems] == [
        "agent",
        "environment",
        *["tasks"] * 3,
    ]
    assert all(str(task) in problem.found for task, problem in zip(tasks[1:], problems[2:], strict=True))


@REAL
def test_an_unknown_option_of_the_agent_is_a_problem(tmp_path: Path) -> None:
    [(path, reason)] = found(tmp_path, agent="terminus-2", agent_options={"max_turn": 2}).items()
    assert path == "agent"
    assert "max_turn" in reason


@REAL
def test_docker_has_to_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert PYTHON is not None
    monkeypatch.setenv("PATH", str(tmp_path))
    [(path, reason)] = found(tmp_path, environment="docker").items()
    assert path == "environment"
    assert "Docker is not installed" in reason


@REAL
def test_rlcore_check_shows_the_first_task(tmp_path: Path) -> None:
    write_task(tmp_path / "tasks" / "a")
    model = make_model(tmp_path / "model", max_length=1024)
    section = {"tasks": str(tmp_path / "tasks"), "python": str(PYTHON), "agent": ONE_ANSWER, "environment": LOCAL}
    recipe = tmp_path / "recipe.toml"
    lines = [f'model.path = "{model}"', 'algorithm.name = "grpo"', 'environment.name = "harbor"']
    recipe.write_text("\n".join([*lines, *(f'environment.harbor.{key} = "{value}"' for key, value in section.items())]))
    done = CliRunner().invoke(cli, ["check", str(recipe)])
    assert done.exit_code == 0, done.output
    assert f"    | '{tmp_path / 'tasks' / 'a'}'" in done.output
    assert "    | 'Say yes.\\n'" in done.output
