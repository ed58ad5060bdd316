"""The hooks before a commit run the tools of `make lint`, from the environment of the checkout."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
HOOKS = {
    hook["id"]: hook
    for repository in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    for hook in repository["hooks"]
}
LINT = re.findall(r"^lint-\w+:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
LINES = re.findall(r"^\t\$\(BIN\)/(.*)", "".join(LINT), re.MULTILINE)


@pytest.mark.parametrize(
    ("name", "command"), [("ruff-format", "ruff format --check"), ("ruff-check", "ruff check"), ("mypy", "mypy $$(")]
)
def test_a_hook_runs_what_lint_runs(name: str, command: str) -> None:
    (line,) = (line for line in LINES if line.startswith(command))
    words = shlex.split(HOOKS[name]["entry"])
    called = words[-1] if words[0] == "bash" else HOOKS[name]["entry"]
    assert called.startswith(f".venv/bin/{' '.join(command.split()[:-1]) or command}")
    assert name != "mypy" or called == ".venv/bin/" + line.replace("$$", "$").replace("$(BIN)", ".venv/bin")
    assert HOOKS[name]["language"] == "system"


@pytest.mark.parametrize(
    ("path", "is_checked"),
    [
        ("core/src/rlcore/gpu.py", True),
        ("torchkit/src/rlcore_torchkit/rl/kl.py", True),
        ("plugins/planner/src/rlcore_plan/plan.py", True),
        ("tests/conftest.py", False),
        ("docs/design.md", False),
    ],
)
def test_mypy_runs_where_a_source_changes(path: str, is_checked: bool) -> None:
    assert bool(re.search(HOOKS["mypy"]["files"], path)) is is_checked
