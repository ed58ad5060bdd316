"""One version for all packages, and ranges that say which of them fit together."""

import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import rlcore


@pytest.fixture(scope="module")
def projects(root):
    paths = (root / "core/pyproject.toml", root / "torchkit/pyproject.toml", *root.glob("plugins/*/pyproject.toml"))
    return {str(path.relative_to(root)): tomllib.loads(path.read_text())["project"] for path in paths}


def test_all_packages_have_the_cores_version(projects):
    wrong = {path: project["version"] for path, project in projects.items() if project["version"] != rlcore.__version__}
    assert not wrong, (
        f"expected {rlcore.__version__}, as rlcore.__version__ says: `release/set_version.py` writes it everywhere"
    )


def test_requirements_of_each_other_are_ranges_of_the_minor_version(projects):
    version = Version(rlcore.__version__)
    first = version if version.is_prerelease else f"{version.major}.{version.minor}"
    expected = SpecifierSet(f">={first},<{version.major}.{version.minor + 1}")
    names = {project["name"] for project in projects.values()}
    requirements = [
        (path, Requirement(line))
        for path, project in projects.items()
        for lines in (project["dependencies"], *project.get("optional-dependencies", {}).values())
        for line in lines
    ]
    wrong = [f"{path}: {found}" for path, found in requirements if found.name in names and found.specifier != expected]
    assert not wrong, f"expected {expected} in\n" + "\n".join(wrong)


def test_every_plugin_requires_the_core(projects):
    silent = [
        path
        for path, project in projects.items()
        if project["name"] != "rlcore" and "rlcore" not in {Requirement(line).name for line in project["dependencies"]}
    ]
    assert not silent


def test_the_changelog_names_the_version_or_has_an_unreleased_part(root):
    headings = re.findall(r"^## \[(.+?)\]", (root / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] in {"Unreleased", rlcore.__version__}
