"""Numbers read from the ways in which they are written, against exact fractions."""

from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rlcore_math.plain_numbers import MAX_CHARACTERS, PlainNumber, plain_number


def decimal(digits, places):
    return f"{Decimal(digits).scaleb(-places):f}"


@given(number=st.integers(-(10**9), 10**9), places=st.integers(0, 6))
def test_decimals(number, places):
    text = decimal(number, places)
    for written in (text, f"({text})", f"{{{text}}}", f"x = {text}", f"2 + 3 = {text}", f"{text} cm", f"\\approx {text}"):
        assert plain_number(written).value == Fraction(text)
    assert plain_number(f"{text}\\%") == PlainNumber(
        value=Fraction(text), is_percentage=True, num_decimals=places, is_decimal=places > 0
    )


@given(number=st.integers(-(10**12), 10**12))
def test_thousands_and_money(number):
    sign, digits = "-" * (number < 0), f"{abs(number):,}"
    for written in (f"{number:,}", f"{sign}\\${digits}", f"\\${sign}{digits}.00"):
        assert plain_number(written).value == number


@given(above=st.integers(-(10**6), 10**6), below=st.integers(1, 10**6))
def test_fractions_that_are_no_whole_number(above, below):
    assume(above % below or not above)
    for written in (f"\\frac{{{above}}}{{{below}}}", f"{above}/{below}"):
        assert plain_number(written).value == Fraction(above, below)


@given(whole=st.integers(1, 1000), above=st.integers(1, 50), below=st.integers(51, 99))
def test_mixed_numbers(whole, above, below):
    for written in (f"{whole} {above}/{below}", f"{whole}\\frac{{{above}}}{{{below}}}"):
        assert plain_number(written).value == whole + Fraction(above, below)
        assert plain_number(f"-{written}").value == -(whole + Fraction(above, below))


@given(digits=st.integers(1, 9999), exponent=st.integers(-30, 30))
def test_powers_of_ten(digits, exponent):
    for times in ("\\times", "\\cdot", "*", "x"):
        assert (
            plain_number(f"{decimal(digits, 2)} {times} 10^{{{exponent}}}").value
            == Fraction(digits, 100) * Fraction(10) ** exponent
        )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "3*4",
        "2^5",
        "84/2",
        "5/0",
        "0/0",
        "5!",
        "--5",
        "5-3",
        "1,2",
        "(1,2)",
        "5 or 6",
        "x > 5",
        "5 = x < 6",
        "1 2",
        "\\pi",
        "5x",
        "9" * 201,
    ],
)
def test_what_is_no_number_or_not_worked_out(text):
    assert plain_number(text) is None
    assert MAX_CHARACTERS == 200


numbers = (
    st.integers(-(10**7), 10**7)
    .flatmap(
        lambda digits: st.sampled_from([f"{digits}", decimal(digits, 6), decimal(digits, 8), f"{digits}/7", f"{digits}\\%"])
    )
    .map(plain_number)
    .filter(lambda number: number is not None)
)


@given(one=numbers, other=numbers)
def test_equality_is_symmetric_and_of_equal_values(one, other):
    assert one.equals(one)
    assert one.equals(other) == other.equals(one)
    if one.value == other.value:
        assert one.equals(other)


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ("1/3", "0.333333", True),
        ("1/3", "0.33333", False),
        ("0.333333", "0.333334", False),
        ("1/3", "0.3333334", False),
        ("12\\%", "0.12", True),
        ("12\\%", "12", True),
        ("12\\%", "1.2", False),
        ("12\\%", "12.5\\%", False),
        ("0.0000001", "0.0000001004", False),
        ("x = 5", "5", True),
        ("x = 5", "x = 5.0", True),
        ("x = 5", "y = 5", False),
        ("5 \\text{ million}", "5000000", True),
    ],
)
def test_which_numbers_are_the_same(one, other, equal):
    assert plain_number(one).equals(plain_number(other)) is equal
