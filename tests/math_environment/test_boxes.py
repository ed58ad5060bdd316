"""The last box of a response."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore_math.boxes import last_box

balanced = st.recursive(
    st.text("ab 1\\,", max_size=4).filter(lambda text: not text.endswith("\\")), lambda inner: inner.map("{{{}}}".format)
)


@given(before=st.text("ab {}\\", max_size=8), content=balanced, after=st.text("ab }1", max_size=8))
def test_what_a_closed_box_holds_is_found_whatever_stands_around_it(before, content, after):
    content = f"4{content}"
    before = before.replace("\\", "")  # a backslash would belong to the box
    assert last_box(f"{before}\\boxed{{{content}}}{after}") == content


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("5", None),
        ("\\boxed 5", None),
        ("\\boxed{5", None),
        ("\\boxed{}", None),
        ("\\boxed{ \t{}}", None),
        ("\\fbox{5}", "5"),
        ("\\boxed  {5}", "5"),
        ("\\boxed{5} or \\boxed{6}", "6"),
        ("\\boxed{5} or \\boxed{}", "5"),
        ("\\boxed{5} or \\boxed{6", "5"),
        ("\\boxed{6 and \\boxed{5}", "5"),
        ("\\boxed{\\boxed{5}+1}", "{5}+1"),
        ("\\boxed{\\{5\\}}", "\\{5\\}"),
        ("\\boxed{a\\}b}", "a\\}b"),
    ],
)
def test_empty_and_open_boxes_are_none(text, content):
    assert last_box(text) == content


@pytest.mark.parametrize(
    "text", ["\\boxed{" * 30_000, "\\boxed" + " " * 200_000, "\\boxed{" * 30_000 + "}" * 20_000, "{" * 200_000, "\\" * 200_001]
)
def test_a_text_takes_time_in_proportion_to_its_length(text: str) -> None:
    began = time.thread_time()
    last_box(text)
    assert time.thread_time() - began < 1.0
