"""The list of released plugins equals the packages of the checkout, and hints name the command from it."""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from rlcore.published_plugins import first_published, how_to_install, pip_line, published

PACKAGES = Path(__file__).parents[2] / "plugins"
ROLES = ("trainer", "generator", "algorithm", "environment", "sink", "importer", "command", "planner", "chart")


def brought(line: str, core: Mapping[str, list[str]]) -> Requirement:
    """The plugin's own requirement: what an extra of the core brings is one plugin."""
    requirement = Requirement(line)
    if requirement.name != "rlcore":
        return requirement
    [extra] = requirement.extras
    [plugin] = core[extra]
    return Requirement(plugin)


def test_the_list_is_that_of_the_checkouts_packages() -> None:
    projects = [tomllib.loads(path.read_text())["project"] for path in PACKAGES.glob("*/pyproject.toml")]
    core = tomllib.loads((PACKAGES.parent / "core" / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    extras = {project["name"]: set(project.get("optional-dependencies", {})) for project in projects}
    found = {
        role: {
            name: project["name"] for project in projects for name in project.get("entry-points", {}).get(f"rlcore.{role}s", {})
        }
        for role in ROLES
    }
    listed = {role: {name: brought(line, core) for name, line in names.items()} for role, names in published().items()}
    assert {role: {name: one.name for name, one in names.items()} for role, names in listed.items()} == found
    assert all(one.extras <= extras[one.name] for names in listed.values() for one in names.values())


@pytest.mark.parametrize(
    ("role", "name", "installed", "told"),
    [
        ("algorithm", "sft", (), "Run: pip install rlcore-sft"),
        ("algorithm", "dapo", ("sft",), "Run: pip install rlcore-grpo"),
        ("algorithm", "gpro", ("grpo", "gspo"), 'Did you mean "grpo"?'),
        ("algorithm", "gpro", (), 'Did you mean "grpo"? Run: pip install rlcore-grpo'),
        ("generator", "VLLM", (), "Did you mean \"vllm\"? Run: pip install 'rlcore-vllm[cuda]'"),
        ("trainer", "swfit", ("swift",), 'Did you mean "swift"?'),
        ("environment", "zzz", ("function",), ""),
        ("sink", "wandb", (), "Run: pip install rlcore-wandb"),
        ("environment", "judge", (), "Run: pip install 'rlcore[rewards]'"),
        ("importer", "nemo_rl", (), 'Did you mean "nemo-rl"? Run: pip install rlcore-import'),
        ("observer", "watch", (), ""),
    ],
)
def test_what_to_do_where_a_name_is_not_installed(role: str, name: str, installed: Sequence[str], told: str) -> None:
    assert how_to_install(role, name, installed) == told


def test_a_run_begins_with_the_first_of_each_role() -> None:
    first = [first_published(role) for role in ("trainer", "generator", "algorithm")]
    assert first == ["rlcore-fsdp2", "rlcore-transformers", "rlcore-grpo"]
    assert first_published("observer") is None
    assert pip_line(["b[x]", "a", "a"]) == "pip install 'b[x]' a"
