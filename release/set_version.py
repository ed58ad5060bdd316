"""Write a version into every package, and what follows from it: the ranges in which packages require each other, links to the
repository, and the changelog's heading: `release/set_version.py 0.2.0 --repository https://host.example/owner/rlcore`."""

import argparse
import datetime
import re
import tomllib
from pathlib import Path

from packages import ROOT, packages
from packaging.version import InvalidVersion, Version

CHANGELOG = "CHANGELOG.md"
_VERSION = re.compile(r'^(version|__version__) = "[^"]+"$', re.MULTILINE)
REQUIREMENT = re.compile(r'"(rlcore(?:-[\w-]+)?)(\[[\w,]+\])?[<>=!~][^"]*"')
_URLS = re.compile(r"^\[project\.urls\]\n(?:.+\n)*\n", re.MULTILINE)
_AFTER_PROJECT = re.compile(r"^\[(?!build-system\]|project\])", re.MULTILINE)
_HEADING = re.compile(r"^## \[Unreleased\]$", re.MULTILINE)


def set_version(version: Version, root: Path = ROOT, repository: str | None = None) -> list[Path]:
    """Write all of it, and return the files that hold it now. Without a repository the packages keep the one that they name."""
    fits = range_of(version)
    projects = [root / one.folder / "pyproject.toml" for one in packages(root)]
    repository = repository or repository_of(projects[0])
    for path in projects:
        text = _one_version(path, version)
        text = REQUIREMENT.sub(lambda match: f'"{match[1]}{match[2] or ""}{fits}"', text)
        path.write_text(text if repository is None else _with_urls(text, repository, version))
    module = root / "core/src/rlcore/__init__.py"
    module.write_text(_one_version(module, version))
    changelog = root / CHANGELOG
    changelog.write_text(_HEADING.sub(f"## [{version}] - {datetime.date.today().isoformat()}", changelog.read_text()))
    return [*projects, module, changelog]


def range_of(version: Version) -> str:
    """Return the range in which packages of a version require each other. One that begins with a pre-release admits it."""
    first = version if version.is_prerelease else f"{version.major}.{version.minor}"
    return f">={first},<{version.major}.{version.minor + 1}"


def repository_of(project: Path) -> str | None:
    """Return the address of the repository that a pyproject.toml names; None without one."""
    urls = tomllib.loads(project.read_text())["project"].get("urls", {})
    return str(urls["Repository"]) if "Repository" in urls else None


def _with_urls(text: str, repository: str, version: Version) -> str:
    links = {
        "Repository": repository,
        "Documentation": f"{repository}/tree/v{version}/docs",
        "Changelog": f"{repository}/blob/v{version}/{CHANGELOG}",
        "Issues": f"{repository}/issues",
    }
    table = "".join(f'{name} = "{link}"\n' for name, link in links.items())
    return _AFTER_PROJECT.sub(lambda match: f"[project.urls]\n{table}\n{match.group()}", _URLS.sub("", text), count=1)


def _one_version(path: Path, version: Version) -> str:
    text, count = _VERSION.subn(rf'\1 = "{version}"', path.read_text())
    if count != 1:
        raise SystemExit(f"{path} states its version {count} times; expected one line such as version = {str(version)!r}")
    return text


def version_of(text: str) -> Version:
    """Return the version that the command line names."""
    try:
        return Version(text)
    except InvalidVersion as error:
        raise argparse.ArgumentTypeError(f"found {text!r}; expected a version such as 0.2.0 or 0.2.0rc1") from error


def repository_from(text: str) -> str:
    """Return the address of a repository that the command line names."""
    if re.fullmatch(r"https://[\w.-]+(/[\w.-]+)+", text) is None:
        raise argparse.ArgumentTypeError(f"found {text!r}; expected an address such as https://host.example/owner/rlcore")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("version", type=version_of)
    parser.add_argument("--repository", type=repository_from, help="its address, for the links on PyPI")
    arguments = parser.parse_args()
    for path in set_version(arguments.version, repository=arguments.repository):
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
