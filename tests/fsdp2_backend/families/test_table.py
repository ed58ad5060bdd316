"""The table in a page."""

import pytest
from attrs import evolve

from rlcore_fsdp2.families.outcome import Outcome
from rlcore_fsdp2.families.table import BEGIN, END, IMAGE_BEGIN, IMAGE_END, images_written, merged, summary, written

GOOD = Outcome(model_type="llama", class_name="LlamaForCausalLM", trainer="agrees", generator="agrees", way="its description")
BAD = Outcome(model_type="odd", class_name="Odd", trainer="refused", trainer_reason="one | two", generator="refused")

UNKNOWN = Outcome(model_type="a", class_name="A")
MISSING = evolve(UNKNOWN, model_type="musicgen")


def test_the_table_replaces_what_is_between_its_marks():
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    once = written(page, [GOOD, BAD])
    assert (once.partition(BEGIN)[0], once.partition(END)[2]) == ("before\n", "\nafter\n")
    assert "old" not in once
    assert "| llama | agrees | its description | agrees |  |" in once
    assert r"| odd | refused |  | refused | one \| two |" in once
    assert written(once, [GOOD, BAD]) == once


def test_rows_of_some_families_are_merged_into_the_table():
    once = written(f"{BEGIN}\n{END}\n", [BAD]).replace(", 20", ", 19")
    more = merged(once, [evolve(GOOD, options="is_decoder = true")])
    assert "| llama | agrees | its description | agrees | with is_decoder = true |" in more
    assert more == merged(more, [BAD])
    assert "2 families, trainer and generator: 1 agrees and agrees, 1 refused and refused" in more
    assert ", 19" in more
    for other in (once.replace("transformers ", "transformers 0."), f"{BEGIN}\n{END}\n"):
        with pytest.raises(ValueError, match="expected transformers"):
            merged(other, [GOOD])


def test_a_page_without_marks_is_refused():
    with pytest.raises(ValueError, match="families"):
        written("a page", [GOOD])


def test_models_of_images_have_a_table_of_their_own():
    page = f"before\n{IMAGE_BEGIN}\nold\n{IMAGE_END}\nafter\n"
    once = images_written(page, [GOOD, evolve(BAD, trainer_reason="its masks")])
    assert "2 classes: 1 agrees, 1 refused." in once
    assert "| odd | refused | its masks |" in once
    assert images_written(once, [GOOD, evolve(BAD, trainer_reason="its masks")]) == once
    with pytest.raises(ValueError, match="images"):
        images_written("a page", [GOOD])


def test_counts():
    assert summary([GOOD, GOOD, BAD]) == ("3 families, trainer and generator: 2 agrees and agrees, 1 refused and refused")
    assert [outcome.is_sound for outcome in (GOOD, BAD, UNKNOWN, MISSING)] == [True, True, False, True]
    assert [outcome.agrees for outcome in (GOOD, BAD, UNKNOWN)] == [True, False, False]
