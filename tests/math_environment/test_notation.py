"""One way of writing for what is written in several."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore_math.notation import plain, tidy

pieces = st.sampled_from(
    [
        "x",
        "7",
        "\\frac12",
        "\\left(",
        "\\right)",
        "²",
        "−",
        "٤",
        "½",
        "\\text{ cm}",
        "$",
        "\\,",
        "^\\circ",
        "1 234",
        "{,}",
        " and ",
        ".",
        "≤",
    ]
)


@given(text=st.lists(pieces, max_size=6).map("".join))
def test_what_is_tidy_holds_nothing_outside_ascii_and_no_spaces_around(text):
    found = tidy(text)
    assert found.isascii()
    assert found == " ".join(found.split())


@pytest.mark.parametrize(
    ("forms", "expected"),
    [
        (
            [
                "42",
                "$42$",
                "$$42$$",
                "\\(42\\)",
                "\\[42\\]",
                "**42**",
                "`42`",
                " 42 .",
                "４２",
                "٤٢",
                "\\text{42}",
                "\\displaystyle 42",
            ],
            "42",
        ),
        (["-7", "−7", "–7", "$−7$"], "-7"),
        (["1234", "1 234", "1\\,234", "1\u202f234"], "1234"),
        (["\\frac{1}{2}", "\\frac12", "\\dfrac12", "\\tfrac{1}2", "\\cfrac1{2}", "½"], "\\frac{1}{2}"),
        (["x^{2}", "x²"], "x^{2}"),
        (["3\\times 10^{5}", "3e5", "3E5"], "3\\times 10^{5}"),
        (["90^\\circ", "90°", "90^{\\circ}", "90\\degree"], "90^\\circ"),
        (["(1, 2)", "\\left(1, 2\\right)", "\\big(1, 2\\big)", "(1,\\; 2)"], "(1, 2)"),
        (["x\\le 3", "x\\leq 3", "x\\leqslant 3", "x≤3"], "x\\le 3"),
        (["\\sqrt{2}", "√2", "√(2)"], "\\sqrt{2}"),
        (["\\color{red}7", "\\textcolor{red}{7}"], "7"),
        (["1, 2", "1\\text{ and } 2", "1\\text{ or } 2"], "1, 2"),
        (["\\emptyset", "\\varnothing", "∅"], "\\emptyset"),
    ],
)
def test_forms_of_one_answer_are_written_alike(forms, expected):
    assert {tidy(form) for form in forms} == {expected}


@pytest.mark.parametrize(("one", "other"), [("4 2", "42"), ("1 23", "123"), ("ab", "a b"), ("1–2", "1-2"), ("1.234", "1,234")])
def test_what_may_mean_something_else_stays_apart(one, other):
    assert tidy(one) != tidy(other)


def test_words_lose_style_quotes_and_case():
    for text in ("east", "East.", "\\text{east}", "\\textbf{\\text{East}}", "“east”", "(east)", "$east$"):
        assert plain(text) == "east"
    assert plain("apples  and\noranges") == "apples and oranges"
