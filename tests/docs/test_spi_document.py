"""docs/spi.md is what the sources say, and docs/versions.md knows the present version."""

from markdown_blocks import ROOT
from spi_document import VERSION, document, exported

import rlcore.spi

DOCS = ROOT / "docs"


def test_the_page_is_current():
    assert (DOCS / "spi.md").read_text(encoding="utf-8") == document(), "run `make docs`"


def test_every_public_name_is_on_the_page():
    page = document()
    names = set().union(*exported().values())
    public = {name for name in rlcore.spi.__all__ if isinstance(getattr(rlcore.spi, name), type)}
    assert len(public) > 50
    assert public <= names
    assert not [name for name in names if f"### `{name}`\n" not in page]


def test_a_field_has_its_type_default_and_meaning():
    assert any(line.startswith("| `priority` | `int` | `0` | `auto` takes the highest;") for line in document().splitlines())


def test_the_changelog_knows_the_present_version():
    text = (DOCS / "versions.md").read_text(encoding="utf-8")
    versions = [line.removeprefix("### ") for line in text.splitlines() if line.startswith("### ")]
    assert versions[0] == VERSION
