"""What is said of a section before a run."""

from types import SimpleNamespace

import pytest
from attrs import evolve

from rlcore.spi import Note
from rlcore_code import sandbox
from rlcore_code.checks import check_code

from .sandboxes import CONFIG, needs_namespaces


def paths(found):
    return [one.path.removeprefix("environment.code.") for one in found]


def test_a_machine_with_namespaces_runs_the_defaults():
    needs_namespaces()
    assert check_code(None, CONFIG) == []


def test_all_problems_are_told_at_once(tmp_path):
    config = evolve(
        CONFIG,
        instruction="Write a program.",
        system_prompt="Be brief.",
        prompt_format="text",
        python=tmp_path / "python",
        readable=(tmp_path, tmp_path / "none"),
    )
    context = SimpleNamespace(environment_timeout_s=60.0)
    found = check_code(context, config)
    assert paths(found) == ["instruction", "system_prompt", "wall_time_s", "python", "readable[1]"]
    assert "at least 15 s less than rollout.environment_timeout_s, which is 60" in str(found[2])


def test_a_machine_that_refuses_is_a_problem_with_a_remedy(tmp_path, monkeypatch):
    refusing = tmp_path / "launcher.py"
    refusing.write_text("""import sys; sys.stderr.write('{"refused": "unshare: Operation not permitted"}')""")
    monkeypatch.setattr(sandbox, "LAUNCHER", refusing)
    [problem] = check_code(None, CONFIG)
    assert problem.path == "environment.code.isolation"
    assert "unshare: Operation not permitted" in problem.found
    assert 'isolation = "limits"' in problem.remedy


def test_an_interpreter_that_cannot_run_is_a_problem(tmp_path):
    needs_namespaces()
    python = tmp_path / "python"
    python.write_text("no program")
    [problem] = check_code(None, evolve(CONFIG, python=python))
    assert problem.path == "environment.code.isolation"
    assert f"the interpreter {python} does not start" in problem.found


def test_the_weaker_isolation_is_noted():
    found = check_code(None, evolve(CONFIG, isolation="limits"))
    assert isinstance(found[0], Note)
    assert "without Landlock they can read what their user can read" in found[0].text


@pytest.mark.parametrize("timeout_s", [75.0, None])
def test_time_enough_is_no_problem(timeout_s):
    found = check_code(SimpleNamespace(environment_timeout_s=timeout_s), CONFIG)
    assert "wall_time_s" not in paths(found)
