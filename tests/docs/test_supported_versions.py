"""docs/supported-versions.md has the present ranges, and the record has tried both ends of each."""

import sys
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "release"))  # the script imports packages.py beside it

import supported_versions  # noqa: E402

RECORD = supported_versions.record()
TRIED = RECORD["tried"]


def test_the_page_is_current() -> None:
    page = (ROOT / supported_versions.DOCUMENT).read_text(encoding="utf-8")
    assert supported_versions.written() == page, "run `make docs`"


@pytest.mark.parametrize("library", supported_versions.LIBRARIES)
def test_all_packages_require_one_range_whose_ends_were_tried_or_are_named(library: str) -> None:
    (text,) = supported_versions.ranges()[library]
    tried = {Version(row[library]).release[:2] for row in TRIED if library in row}
    untried = " ".join(row["what"] for row in RECORD["untried"])
    for bound in SpecifierSet(text):
        major, minor, *_ = Version(bound.version).release
        end = (major, minor) if bound.operator == ">=" or Version(bound.version).micro else (major, minor - 1)
        assert end in tried or f"{library} {major}.{end[1]}" in untried, f"{library}{bound}"


@pytest.mark.parametrize("row", TRIED, ids=lambda row: f"{row['date']} {row['device']} {row.get('python', '')}")
def test_what_was_tried_is_in_the_ranges(row: dict[str, object]) -> None:
    assert str(row.get("python", "3.11"))[:4] in supported_versions.pythons()
    for library, ranges in supported_versions.ranges().items():
        if library in row:
            assert any(SpecifierSet(text).contains(str(row[library]), prereleases=True) for text in ranges), library
