"""Which responses give the right answer, in all the ways that numbers and LaTeX are written."""

import pytest

from rlcore_math.answers import judge

RIGHT = [
    ("42", "\\boxed{42}"),
    ("42", "the answer is 42."),
    ("42", "40 + 2 = 42"),
    ("42", "#### 42"),
    ("She has 40+2=<<40+2=42>>42 eggs.\n#### 42", "\\boxed{42}"),
    ("so\n#### 1,234", "The answer is 1234."),
    ("1234", "\\boxed{1,234}"),
    ("70000", "\\boxed{70{,}000}"),
    ("18", "She makes $18.00 every day"),
    ("$18", "18 dollars"),
    ("\\$1,000", "\\boxed{1000}"),
    ("12%", "\\boxed{12\\%}"),
    ("12%", "0.12"),
    ("12\\%", "12"),
    ("1/2", "0.5"),
    ("0.5", "\\boxed{\\frac{1}{2}}"),
    ("\\frac{1}{2}", "\\boxed{\\frac{2}{4}}"),
    ("$\\frac12$", "1/2"),
    ("1 1/2", "\\boxed{\\frac{3}{2}}"),
    ("3/2", "\\boxed{1 1/2}"),
    ("1\\frac{1}{2}", "1.5"),
    ("-7", "\\boxed{-7}"),
    ("-7", "it is \u22127"),
    ("3.5", "3.50"),
    ("x = 5", "\\boxed{5}"),
    ("5", "$x = 5$"),
    ("\\sqrt{8}", "\\boxed{2\\sqrt{2}}"),
    ("x^2+2x+1", "$(x+1)^2$"),
    ("2^{10}", "1024"),
    ("(1, 2)", "\\boxed{(1,2)}"),
    ("\\{1, 2\\}", "\\boxed{\\{2, 1\\}}"),
    ("\\text{yes}", "\\boxed{\\text{yes}}"),
    ("A", "\\boxed{A}"),
    ("12 \\text{ cm}", "\\boxed{12}"),
    ("We find $x = 3$, so $x + 1 = \\boxed{4}$.", "\\boxed{4}"),
    ("5", "first \\boxed{5}, since 2 + 4 = 6 is too much"),
    ("7", "word " * 5000 + "\\boxed{7}"),
]

WRONG = [
    ("42", "\\boxed{24}"),
    ("42", "42 is not it, 43 is"),
    ("42", "\\boxed{-42}"),
    ("42", "\\boxed{42.001}"),
    ("1234", "\\boxed{1.234}"),
    ("1/2", "\\boxed{\\frac{2}{1}}"),
    ("1/3", "0.333"),
    ("1 1/2", "\\boxed{1}"),
    ("5", "\\boxed{1} \\boxed{5}"),
    ("5", "\\boxed{1, 2, 3, 4, 5}"),
    ("5", "\\boxed{x}"),
    ("(1, 2)", "\\boxed{(2, 1)}"),
    ("x^2+2x+1", "$(x-1)^2$"),
    ("\\pi", "3.14"),
    ("yes", "\\boxed{\\text{no}}"),
]


@pytest.mark.parametrize(("reference", "response"), RIGHT)
def test_right_answers(reference, response):
    assert judge(reference, response, require_boxed=False) == "right"


@pytest.mark.parametrize(("reference", "response"), WRONG)
def test_wrong_answers(reference, response):
    assert judge(reference, response, require_boxed=False) == "wrong"


@pytest.mark.parametrize("response", ["", "I do not know", "five"])
def test_responses_without_an_answer(response):
    assert judge("5", response, require_boxed=False) == "no_answer"


@pytest.mark.parametrize(
    ("response", "verdict"),
    [("the answer is 5", "no_answer"), ("the answer is \\boxed{5}", "right"), ("5, or \\boxed{6}", "wrong")],
)
def test_a_box_may_be_required(response, verdict):
    assert judge("5", response, require_boxed=True) == verdict


@pytest.mark.parametrize("reference", ["", "   ", "some words ####", "#### "])
def test_references_without_an_answer(reference):
    assert judge(reference, "5", require_boxed=False) == "unreadable_reference"
