"""Surrogates by themselves are found and named; every other text passes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.schema.printable import lone_surrogate


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_unicode_text_has_none(text: str) -> None:
    assert lone_surrogate(text) is None


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a\ud800", "half a character (the surrogate \\ud800 by itself) at character 1"),
        ("\udcff", "half a character (the surrogate \\udcff by itself) at character 0"),
        ("é\ud83d\ude00", "half a character (the surrogate \\ud83d by itself) at character 1"),
    ],
)
def test_the_first_one_is_named_with_its_place(text: str, found: str) -> None:
    assert lone_surrogate(text) == found
