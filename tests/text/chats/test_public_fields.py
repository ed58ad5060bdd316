"""Tests that readers follow the table of public fields, and that docs/data.md shows it."""

from pathlib import Path

import pytest

from rlcore.spi import DataError
from rlcore_text.chats.messages import read_messages, read_tools
from rlcore_text.chats.public_fields import FIELDS, instead_of

DOCUMENT = Path(__file__).parents[3] / "docs" / "data.md"
HEADS = {
    "row": "Rows",
    "message": "Messages",
    "part": "Parts of a message's content",
    "call": "Calls of tools",
    "tool": "Tools",
}
READ = {
    "message": lambda field: read_messages([{"role": "assistant", "content": "a", **field}])[0],
    "part": lambda field: read_messages([{"role": "user", "content": [{"type": "text", "text": "a", **field}]}])[0],
    "call": lambda field: read_messages([{"role": "assistant", "tool_calls": [{"function": {"name": "f"}, **field}]}])[0],
    "tool": lambda field: read_tools([{"name": "f", **field}])[0]["function"],
}


def named(*decisions):
    return [(one.level, name) for one in FIELDS if one.level != "row" and one.decision in decisions for name in one.names]


def shown(level):
    """Names, decision and meaning of each field in the page's table of a level; the second column is who defines them."""
    section = DOCUMENT.read_text().partition(f"### {HEADS[level]}\n")[2].partition("\n#")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `")]
    return [(names, decision, meaning) for names, _, decision, meaning in rows]


def written(one):
    names = ", ".join(f"`{name}`" for name in one.names)
    return names, f"{one.decision}; reported in prompts of rewards" if one.for_environment else one.decision, one.meaning


@pytest.mark.parametrize("level", HEADS)
def test_the_page_shows_the_table(level):
    assert shown(level) == [written(one) for one in FIELDS if one.level == level]


def test_each_field_is_decided_once():
    names = [(one.level, name) for one in FIELDS for name in one.names]
    assert len(names) == len({*names})


@pytest.mark.parametrize(("level", "name"), named("refused"))
def test_fields_that_are_refused_are_named_with_what_to_do(level, name):
    with pytest.raises(DataError, match=f"field '{name}'") as raised:
        READ[level]({name: "x"})
    assert instead_of(level, name) in str(raised.value)


@pytest.mark.parametrize(("level", "name"), named("no effect"))
def test_fields_without_effect_change_nothing(level, name):
    found = {key: value for key, value in READ[level]({name: "x"}).items() if key != name}
    assert found == READ[level]({})


@pytest.mark.parametrize(("level", "name"), named("refused", "no effect"))
def test_null_is_no_value_of_any_field(level, name):
    found = {key: value for key, value in READ[level]({name: None}).items() if value is not None}
    assert found == READ[level]({})
