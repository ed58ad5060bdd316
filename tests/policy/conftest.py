"""The sources that the policies are about."""

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def core_files() -> list[Path]:
    """Every module of the core's distribution."""
    return sorted((ROOT / "core" / "src").rglob("*.py"))


@pytest.fixture(scope="session")
def torchkit_files() -> list[Path]:
    """Every module of the torch code that plugins share."""
    return sorted((ROOT / "torchkit" / "src").rglob("*.py"))


@pytest.fixture(scope="session")
def plugin_files() -> list[Path]:
    """Every module of the plugins' distributions, without the templates of `rlcore new-plugin`, which are others' modules."""
    return sorted(path for path in (ROOT / "plugins").glob("*/src/**/*.py") if "templates" not in path.parts)


@pytest.fixture(scope="session")
def plugin_projects() -> dict[str, dict]:
    """pyproject.toml of each plugin, by its import name."""
    projects = {}
    for path in sorted((ROOT / "plugins").glob("*/pyproject.toml")):
        project = tomllib.loads(path.read_text())
        (package,) = (folder.name for folder in (path.parent / "src").iterdir() if (folder / "__init__.py").exists())
        projects[package] = project
    return projects
