"""Sets and conditions in one way of writing, and which of them are the same answer."""

import pytest

from rlcore_math.answers import judge
from rlcore_math.sets import in_intervals

POSITIVE, OUTER, INNER, HOLE = "(0,\\infty)", "(-\\infty,0)\\cup(2,\\infty)", "[1,2]", "(-\\infty,2)\\cup(2,\\infty)"
SAME = {
    POSITIVE: [
        *("{x | x > 0}", "\\{x \\mid x > 0\\}", "\\{x: 0 < x\\}", "\\{t \\in \\mathbb{R} \\mid t>0\\}", "{x ∈ ℝ ∣ x > 0}"),
        *("{x ∈ R | x > 0}", "\\lbrace x \\mid x > 0 \\rbrace", "\\{x \\text{ such that } x > 0\\}", "{x such that x > 0}"),
        *("\\{x\\in\\R: x>0\\}", "\\{x \\in \\mathbf{R} | x > 0\\}"),
        *("\\left\\{x\\,\\middle|\\,x>0\\right\\}", "\\{x>0\\}", "x>0, x\\in\\mathbb{R}", "0<x<\\infty", "x > 0"),
        *("x \\gt 0", "x \\in \\mathbb{R}^+", "\\R^+", "\\{x \\in \\Bbb R | x>0\\}", "\\{x; x>0\\}", "\\set{x | x>0}"),
        *(
            "\\theta > 0",
            "\\{\\lambda \\in \\mathbb{R} \\mid \\lambda > 0\\}",
            "\\mathopen{]}0,\\infty\\mathclose{[}",
            "\\mathbb{R}^*_+",
        ),
        *("\\bigg\\{x \\,\\bigg|\\, x>0\\bigg\\}",),
        *("\\mathbb{R}^+", "\\mathbb{R}_{>0}", "]0,\\infty[", "x \\in (0,\\infty)", "\\{x \\mid x \\ge 0, x \\neq 0\\}"),
    ],
    OUTER: [
        *(
            "x<0 \\text{ or } x>2",
            "x<0, x>2",
            "x<0 or x>2",
            "x < 0 ∨ x > 2",
            "x<0 \\cup x>2",
            "\\{x \\mid x>2 \\text{ or } x<0\\}",
        ),
        "\\{x\\mid x<0\\}\\cup\\{x\\mid x>2\\}",
    ],
    INNER: [
        "\\{x \\mid 1\\le x\\le 2\\}",
        "x\\ge1 \\text{ and } x\\le 2",
        "2 ≥ x ≥ 1",
        "{x | 1 ≤ x ≤ 2}",
        "x \\le 2, x \\ge 1, x<3",
    ],
    HOLE: [
        "x \\in \\mathbb{R}, x \\ne 2",
        "R \\setminus \\{2\\}",
        "x\\ne 2",
        "\\{x \\mid x\\neq 2\\}",
        "\\mathbb{R}\\setminus\\{2\\}",
        "ℝ ∖ {2}",
    ],
    "\\mathbb{R}": [
        "\\R",
        "\\text{all real numbers}",
        "all real numbers",
        "\\{x\\mid x\\in\\mathbb{R}\\}",
        "x>1 or x<2",
        "(-\\infty,\\infty)",
    ],
    "[0,\\infty)": ["\\mathbb{R}_0^+", "\\mathbb{R}^+_0", "|x| \\ge 0, x \\ge 0"],
    "(-2,2)": ["|x|<2", "\\{x \\mid |x|<2\\}", "\\{x : \\lvert x\\rvert < 2\\}"],
    "[\\frac{1}{2},\\frac{5}{2}]": ["|x-1.5| \\le 1", "{x | |x - 1.5| ≤ 1}"],
    "(-\\infty,-3]\\cup[1,\\infty)": ["|x+1| \\ge 2", "\\{x | |x+1|\\ge 2\\}"],
    "\\{-2,2\\}": ["\\pm 2", "x=\\pm2", "±2"],
    "\\mathbb{R}\\setminus\\{0,1\\}": ["x\\ne 0, 1", "x≠0,1"],
    "(-\\infty,-1)\\cup(1,\\infty)": ["(-\\infty;-1)\\cup(1;+\\infty)", "\\mathbb{R}\\setminus[-1,1]"],
    "[-1,1]": ["[-1;1]", "x \\in [-1; 1]"],
    "\\{1,2\\}": ["\\{x \\mid x=2 \\text{ or } x=1\\}", "x=1, x=2"],
    "[-1,2)\\cup(2,\\infty)": ["x\\ge -1, x\\ne 2", "\\{x \\mid x\\ge -1 \\text{ and } x\\ne 2\\}"],
    "(\\sqrt{2},\\infty)": ["\\{x \\mid x>\\sqrt{2}\\}"],
    "[0,2\\pi)": ["\\{x \\mid 0\\le x<2\\pi\\}", "2\\pi > x \\ge 0"],
    "\\emptyset": ["\\{x \\mid 2<x<1\\}", "x<0 \\text{ and } x>2"],
}
OTHERS = {
    POSITIVE: [
        "\\{x \\mid x\\ge 0\\}",
        "\\{x \\in \\mathbb{Z} \\mid x>0\\}",
        "{x | x < 0}",
        "{y | x > 0}",
        "\\{x \\mid x>1-1\\}",
        "0",
    ],
    OUTER: ["x>0, x<2", "x<0 \\text{ and } x>2", "\\{x \\mid 0<x<2\\}"],
    "(-2,2)": ["|x|>2", "|x|\\le 2", "|x-1|<2", "|x|<y"],
    INNER: ["\\{x \\mid 1\\le x<2\\}", "x\\ge 1 \\text{ or } x\\le 2", "x \\ge 2, x \\le 1"],
    "[0,2\\pi)": ["\\{x \\mid 0\\le x\\le 2\\pi\\}", "\\{x \\mid -\\pi\\le x<\\pi\\}"],
    "\\{-2,2\\}": ["(-2,2)", "[-2,2]", "\\pm 3", "(2,-2)"],
    "(\\frac{1}{2},2)": ["\\{\\frac{1}{2},2\\}"],
    "\\mathbb{R}\\setminus(-1,1)": ["\\mathbb{R}\\setminus[-1,1]", "(-\\infty,-1)\\cup(1,\\infty)"],
    "5": ["\\{x \\mid x>5\\}", "x\\ne 5", "\\mathbb{R}\\setminus\\{5\\}"],
}


@pytest.mark.parametrize(("one", "other"), [(one, other) for one, others in SAME.items() for other in others])
def test_a_set_its_condition_and_its_intervals_are_the_same(one: str, other: str) -> None:
    assert judge(one, f"\\boxed{{{other}}}", require_boxed=True) == "right"
    assert judge(other, f"\\boxed{{{one}}}", require_boxed=True) == "right"


@pytest.mark.parametrize(("one", "other"), [(one, other) for one, others in OTHERS.items() for other in others])
def test_other_sets_are_wrong(one: str, other: str) -> None:
    assert judge(one, f"\\boxed{{{other}}}", require_boxed=True) == "wrong"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        *((POSITIVE, f"(0,{end})") for end in ("inf", "+inf", "Infinity", "oo", " \\infty ")),
        ("(-\\infty,2]", "(-inf, 2]"),
        ("\\{1,2,3\\}", "\\{x \\in \\mathbb{Z} : 0 < x < 4\\}"),
        ("{n ∈ ℤ | 1 ≤ n ≤ 3}", "\\{1,2,3\\}"),
        ("\\{n \\in \\mathbb{Z}^+ : n < 4\\}", "\\{1,2,3\\}"),
        ("\\{n \\in \\mathbb{N} : 0 < n < 7/2\\}", "\\{1,2,3\\}"),
        ("\\{x \\in \\Z: |x| < 2\\}", "\\{-1,0,1\\}"),
        ("\\{x \\in \\mathbb{Z} : x>0\\}", "\\{x \\in \\mathbb{Z} : x \\ge 1\\}"),
        ("\\{x \\in \\mathbb{Z} : 1 < x < 2\\}", "\\emptyset"),
        ("(0,1)\\cup(1,\\infty)", "\\{x>0 : x≠1\\}"),
        ("(0,1)\\cup(1,\\infty)", "\\{x > 0 \\mid x \\neq 1\\}"),
        ("(0,1)\\cup(1,2)", "\\{0 < x < 2: x \\ne 1\\}"),
        ("(0,1)", "\\{x : x > 0\\} \\cap \\{x : x < 1\\}"),
        ("(0,1]", "(0,\\infty) ∩ (-2, 1]"),
        ("(-\\infty,0)\\cup(1,\\infty)", "x ∉ [0,1]"),
        ("(-\\infty,2)\\cup(2,\\infty)", "x \\notin \\{2\\}"),
    ],
)
def test_sets_of_integers_and_words_for_infinity_are_read(one: str, other: str) -> None:
    for reference, given in ((one, other), (other, one)):
        assert judge(reference, f"\\boxed{{{given}}}", require_boxed=True) == "right"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("(-2,2)", "\\{x : x^2<4\\}"),
        ("(-2,2)", "\\{x \\in \\mathbb{R} \\mid x^2 - 4 < 0\\}"),
        ("(-\\sqrt{2},\\sqrt{2})", "{x | x^2 < 2}"),
        ("(0,\\sqrt{2})", "\\{x>0 : x^2<2\\}"),
        ("(-\\infty,-2]\\cup[2,\\infty)", "\\{x \\mid x^2 \\ge 4\\}"),
        ("(-\\infty,2)\\cup(2,3)\\cup(3,\\infty)", "\\{x \\mid x^2-5x+6 \\ne 0\\}"),
        ("\\{-2,2\\}", "\\{x : x^2=4\\}"),
        ("\\{-1,0,1\\}", "\\{n \\in \\mathbb{Z} : n^2<4\\}"),
        ("[1,2]", "\\{x : 1 \\le 2x-1 \\le 3\\}"),
        ("(-2,1)", "\\{x \\mid \\frac{x-1}{x+2}<0\\}"),
        ("[-1,3)", "\\{t : \\sqrt{t+1}<2\\}"),
        ("(-\\infty,\\ln 2)", "\\{x : e^x<2\\}"),
        ("(1,\\infty)", "\\{x : |x-2|<|x|\\}"),
        ("\\mathbb{R}", "\\{x : x^2+1>0\\}"),
        ("\\emptyset", "\\{x : x^2<-1\\}"),
        ("(1,2)\\cup(3,\\infty)", "\\{x : (x-1)(x-2)(x-3)>0\\}"),
    ],
)
def test_conditions_of_sets_are_solved(one: str, other: str) -> None:
    for reference, given in ((one, other), (other, one)):
        assert judge(reference, f"\\boxed{{{given}}}", require_boxed=True) == "right"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("(-2,2)", "\\{x : x^2\\le 4\\}"),
        ("(-2,2)", "\\{x : x^2<y\\}"),
        ("(-2,2)", "x^2<4"),
        ("\\{-2,2\\}", "\\{x : x^2<4\\}"),
        ("(-2,2)", "\\{n \\in \\mathbb{Z} : n^2<4\\}"),
        ("[0,\\pi]", "\\{x : \\sin x \\ge 0\\}"),
        ("(0,1)", "\\{x : x^5-x+3<0\\}"),
    ],
)
def test_other_conditions_and_unsolved_ones_are_wrong(one: str, other: str) -> None:
    assert judge(one, f"\\boxed{{{other}}}", require_boxed=True) == "wrong"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("\\{1,2,3\\}", "(0,4)"),
        ("(0,4)", "\\{x \\in \\mathbb{Z} : 0 < x < 4\\}"),
        (POSITIVE, "\\{x \\in \\mathbb{Z} : x>0\\}"),
        ("\\{x \\in \\mathbb{Z} : x>0\\}", POSITIVE),
        ("\\{n \\in \\mathbb{N} : n < 4\\}", "\\{1,2,4\\}"),
        ("\\{x \\in \\mathbb{Z} : 0 < x < 5000\\}", "\\{1,2\\}"),
    ],
)
def test_integers_are_no_intervals(one: str, other: str) -> None:
    assert judge(one, f"\\boxed{{{other}}}", require_boxed=True) == "wrong"


@pytest.mark.parametrize(
    "answer",
    [
        "42",
        "x = 5",
        "x > 3",
        "(1,2)",
        "\\{1,2\\}",
        "3:2",
        "12:30",
        "f(3)=42",
        "6x7",
        "x+y<2, x>0",
        "a<x<b<c",
        "40+2=42",
        "x=40+2=42",
        "",
    ],
)
def test_what_is_no_set_of_one_number_stays_as_it_is(answer: str) -> None:
    assert in_intervals(answer) == answer
