"""Texts of the same tokens, as servers and the recipe's tokenizer make them."""

import pytest

from rlcore_openai.tokenizer import same_text


@pytest.mark.parametrize(
    ("told", "own", "same"),
    [
        ("Paris is", ["Paris is", "Paris is"], True),
        ("Paris is", [" Paris is\n", "x"], True),
        ("Paris<eos>", ["Paris", "Paris<eos>"], True),
        ("Pari", ["Pari\N{REPLACEMENT CHARACTER}", ""], True),
        ("", ["Paris", "Paris"], True),
        ("Paris is", ["Rome is", "Rome is"], False),
        ("Paris", ["", ""], False),
    ],
)
def test_texts_are_the_same_but_for_spaces_special_tokens_and_broken_characters(told: str, own: list[str], same: bool) -> None:
    assert same_text(told, own) is same
