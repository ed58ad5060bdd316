"""The table in a page."""

import pytest

from rlcore_fsdp2.families.outcome import Outcome
from rlcore_fsdp2.families.table import BEGIN, END, summary, written

GOOD = Outcome(model_type="llama", class_name="LlamaForCausalLM", trainer="agrees", generator="agrees", way="its description")
BAD = Outcome(model_type="odd", class_name="Odd", trainer="refused", trainer_reason="one | two", generator="refused")


def test_the_table_replaces_what_is_between_its_marks():
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    once = written(page, [GOOD, BAD])
    assert (once.partition(BEGIN)[0], once.partition(END)[2]) == ("before\n", "\nafter\n")
    assert "old" not in once
    assert "| llama | agrees | its description | agrees |  |" in once
    assert r"| odd | refused |  | refused | one \| two |" in once
    assert written(once, [GOOD, BAD]) == once


def test_a_page_without_marks_is_refused():
    with pytest.raises(ValueError, match="families"):
        written("a page", [GOOD])


def test_counts():
    assert summary([GOOD, GOOD, BAD]) == ("3 families, trainer and generator: 2 agrees and agrees, 1 refused and refused")
    assert [outcome.is_sound for outcome in (GOOD, BAD, Outcome(model_type="a", class_name="A"))] == [True, True, False]
