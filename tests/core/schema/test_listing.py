"""Names in a message."""

import pytest

from rlcore.schema.suggestions import listed


@pytest.mark.parametrize(
    ("number", "expected"), [(0, ""), (1, "a"), (3, "a, b, c"), (4, "a, b, c and 1 more"), (6, "a, b, c and 3 more")]
)
def test_the_first_few_are_named_and_the_others_counted(number: int, expected: str) -> None:
    assert listed("abcdef"[:number]) == expected


def test_number_and_separator_may_be_others() -> None:
    assert listed(["a", "b", "c"], 2, "; ") == "a; b and 1 more"
