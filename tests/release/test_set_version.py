"""A new version reaches every package, and the ranges in which they require each other."""

import argparse
import re
import tomllib
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).parents[2]


def test_every_file_has_it_and_nothing_else_changes(builder, versions, checkout):
    changed = versions.set_version(Version("7.3.1rc1"), checkout)
    assert '\n__version__ = "7.3.1rc1"\n' in (checkout / "core/src/rlcore/__init__.py").read_text()
    assert len(changed) == len(builder.packages()) + 2
    for folder in (ROOT / one.folder for one in builder.packages()):
        name = folder.relative_to(ROOT)
        text = (checkout / name / "pyproject.toml").read_text()
        project = tomllib.loads(text)["project"]
        assert project["version"] == "7.3.1rc1"
        ours = [line for line in project["dependencies"] if line.startswith("rlcore")]
        assert all(line.endswith(">=7.3.1rc1,<7.4") for line in ours)
        assert ours or project["name"] == "rlcore"
        before = (folder / "pyproject.toml").read_text().splitlines()
        differing = [line for line, old in zip(text.splitlines(), before, strict=True) if line != old]
        assert all(line.startswith("version =") or '"rlcore' in line for line in differing)


@pytest.mark.parametrize(
    ("version", "expected"),
    [("0.2.0", ">=0.2,<0.3"), ("0.2.3", ">=0.2,<0.3"), ("0.2.0rc1", ">=0.2.0rc1,<0.3"), ("1.0.0.dev3", ">=1.0.0.dev3,<1.1")],
)
def test_the_range_admits_the_version(versions, version, expected):
    assert versions.range_of(Version(version)) == expected
    assert SpecifierSet(expected).contains(version)


HOST = "https://host.example/owner"


@pytest.mark.parametrize("name", ["core", "plugins/grpo", "plugins/rewards"])
def test_links_are_those_of_the_repository_and_of_the_version(versions, checkout, name):
    versions.set_version(Version("7.3.1"), checkout, f"{HOST}/other")
    versions.set_version(Version("7.3.2"), checkout, f"{HOST}/rlcore")
    versions.set_version(Version("7.3.3"), checkout)
    before, after = (tomllib.loads((root / name / "pyproject.toml").read_text()) for root in (ROOT, checkout))
    assert after["project"].pop("urls") == {
        "Repository": f"{HOST}/rlcore",
        "Documentation": f"{HOST}/rlcore/tree/v7.3.3/docs",
        "Changelog": f"{HOST}/rlcore/blob/v7.3.3/CHANGELOG.md",
        "Issues": f"{HOST}/rlcore/issues",
    }
    before["project"].pop("urls", None)
    assert after["project"].keys() == before["project"].keys()
    assert after["tool"] == before["tool"]


def test_the_changelog_names_version_and_date_and_older_ones_stay(versions, checkout):
    versions.set_version(Version("7.3.1"), checkout)
    headings = re.findall(r"^## (.+)$", (checkout / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[1:] == ["[0.0.1] - 2020-01-01"]
    assert re.fullmatch(r"\[7\.3\.1\] - \d{4}-\d\d-\d\d", headings[0])


@pytest.mark.parametrize("text", ["host.example/a/b", "https://host.example", "https://host.example/a/b/", "http://h/a/b"])
def test_what_is_no_repository_is_refused(versions, text):
    with pytest.raises(argparse.ArgumentTypeError):
        versions.repository_from(text)


def test_a_file_without_a_version_is_named(versions, checkout):
    path = checkout / "plugins/grpo/pyproject.toml"
    path.write_text(path.read_text().replace("version = ", "release = "))
    with pytest.raises(SystemExit, match="plugins/grpo/pyproject.toml states its version 0 times"):
        versions.set_version(Version("7.3.1"), checkout)


def test_what_is_no_version_is_refused(versions):
    with pytest.raises(argparse.ArgumentTypeError, match="v1-final"):
        versions.version_of("v1-final")
