"""What a text behind a number makes of it."""

import pytest

from rlcore_math.units import CURRENCIES, MULTIPLES, unit_factor


@pytest.mark.parametrize(
    "text",
    [
        "",
        *CURRENCIES,
        "cm",
        "km / h",
        "cm^2",
        "m^{3}",
        "^\\circ",
        "^\\circ C",
        "\\text{ square meters}",
        "\\mathrm{kg}",
        "apples",
        "kWh",
    ],
)
def test_units_and_things_leave_a_number_as_it_is(text):
    assert unit_factor(text, spaced=True) == 1


@pytest.mark.parametrize("word", MULTIPLES)
def test_words_of_number_multiply(word):
    assert unit_factor(word, spaced=True) == MULTIPLES[word]
    assert unit_factor(f"\\text{{{word} dollars}}", spaced=False) == MULTIPLES[word]


def test_words_of_number_multiply_each_other():
    assert unit_factor("hundred thousand", spaced=True) == 10**5


@pytest.mark.parametrize(
    "text",
    ["and 5", "or more", "mod 7", "squared", "to", "\\text{ choose }2", "dozen", "pi", "x", "ab", "+1", "^2", "m^4", "=5", "!"],
)
def test_what_makes_something_else_of_a_number_is_no_unit(text):
    assert unit_factor(text, spaced=True) is None


@pytest.mark.parametrize("text", ["m", "h", "apples"])
def test_right_behind_a_number_letters_are_variables(text):
    """5m is five times m, and 5 m five metres; units that are nothing else need no space."""
    assert unit_factor(text, spaced=False) is None
    assert unit_factor(text, spaced=True) == 1
    assert unit_factor("km", spaced=False) == 1
