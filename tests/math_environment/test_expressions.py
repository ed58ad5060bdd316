"""What the calculator works out, and what it refuses, quickly."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore_math.expressions import MAX_CHARACTERS, evaluate


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2+3*4", "14"),
        (" (2+3) * -4 ", "-20"),
        ("7/2", "7/2"),
        ("0.1+0.2", "3/10"),
        ("10/4*2", "5"),
        ("+3", "3"),
        ("99999999999999999999*99999999999999999999", "9999999999999999999800000000000000000001"),
    ],
)
def test_values_are_exact(expression, value):
    assert evaluate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "1/0",
        "2**9",
        "x",
        "__import__('os')",
        "True",
        "'a'",
        "1;2",
        "[1]",
        "1e999",
        "nan",
        "9" * 150,
        "(" * 150,
        "9" * 99 + "*99",
    ],
)
def test_all_else_is_a_value_error(expression):
    with pytest.raises(ValueError, match=r"."):
        evaluate(expression)


@given(st.text(max_size=MAX_CHARACTERS + 5))
def test_no_text_raises_anything_else(expression):
    with contextlib.suppress(ValueError):
        assert evaluate(expression)
