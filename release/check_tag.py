"""Check that the checkout is the release of a tag: `release/check_tag.py v0.2.0 https://host.example/owner/rlcore`."""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

from packages import ROOT, packages
from packaging.version import Version
from set_version import CHANGELOG, REQUIREMENT, range_of, repository_of


def problems(tag: str, repository: str, root: Path = ROOT) -> Iterator[str]:
    """Yield what a release of this tag would state wrongly."""
    for one in packages(root):
        version, project = one.project["version"], root / one.folder / "pyproject.toml"
        if f"v{version}" != tag:
            yield f"{project.relative_to(root)} has the version {version}; expected that of the tag {tag}"
        required = {match.group()[1:-1] for match in REQUIREMENT.finditer(project.read_text())}
        if wrong := sorted(line for line in required if not line.endswith(range_of(Version(version)))):
            yield f"{project.relative_to(root)} requires {', '.join(wrong)}; expected {range_of(Version(version))}"
        if repository_of(project) != repository:
            yield f"{project.relative_to(root)} names the repository {repository_of(project)}; expected {repository}"
    headings = re.findall(r"^## (\[.+)$", (root / CHANGELOG).read_text(), re.MULTILINE)
    if not headings or re.fullmatch(rf"\[{re.escape(tag.removeprefix('v'))}\] - \d{{4}}-\d\d-\d\d", headings[0]) is None:
        found = headings[0] if headings else "no heading"
        yield f"{CHANGELOG} begins with {found}; expected [{tag.removeprefix('v')}] and the date"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("tag")
    parser.add_argument("repository")
    arguments = parser.parse_args()
    if found := list(problems(arguments.tag, arguments.repository)):
        raise SystemExit("\n".join([*found, "Run release/set_version.py with the version and --repository, and commit"]))


if __name__ == "__main__":
    main()
