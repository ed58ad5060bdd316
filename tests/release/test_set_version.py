"""A new version reaches every package, and the ranges in which they require each other."""

import argparse
import shutil
import tomllib
from pathlib import Path

import pytest
from packaging.version import Version

ROOT = Path(__file__).parents[2]


@pytest.fixture
def checkout(builder, tmp_path):
    for folder in (ROOT / one.folder for one in builder.packages()):
        (tmp_path / folder.relative_to(ROOT)).mkdir(parents=True)
        shutil.copy(folder / "pyproject.toml", tmp_path / folder.relative_to(ROOT))
    (tmp_path / "core/src/rlcore").mkdir(parents=True)
    shutil.copy(ROOT / "core/src/rlcore/__init__.py", tmp_path / "core/src/rlcore")
    return tmp_path


def test_every_file_has_it_and_nothing_else_changes(builder, versions, checkout):
    changed = versions.set_version(Version("7.3.1rc1"), checkout)
    assert '\n__version__ = "7.3.1rc1"\n' in (checkout / "core/src/rlcore/__init__.py").read_text()
    assert len(changed) == len(builder.packages()) + 1
    for folder in (ROOT / one.folder for one in builder.packages()):
        name = folder.relative_to(ROOT)
        text = (checkout / name / "pyproject.toml").read_text()
        project = tomllib.loads(text)["project"]
        assert project["version"] == "7.3.1rc1"
        ours = [line for line in project["dependencies"] if line.startswith("rlcore")]
        assert all(line.endswith(">=7.3,<7.4") for line in ours)
        assert ours or project["name"] == "rlcore"
        before = (folder / "pyproject.toml").read_text().splitlines()
        differing = [line for line, old in zip(text.splitlines(), before, strict=True) if line != old]
        assert all(line.startswith("version =") or '"rlcore' in line for line in differing)


def test_a_file_without_a_version_is_named(versions, checkout):
    path = checkout / "plugins/grpo/pyproject.toml"
    path.write_text(path.read_text().replace("version = ", "release = "))
    with pytest.raises(SystemExit, match="plugins/grpo/pyproject.toml states its version 0 times"):
        versions.set_version(Version("7.3.1"), checkout)


def test_what_is_no_version_is_refused(versions):
    with pytest.raises(argparse.ArgumentTypeError, match="v1-final"):
        versions.version_of("v1-final")
