"""The strict converter on types other than a class; tests/core/config tries it on whole recipes."""

from typing import Annotated, Any, Literal

import pytest

from rlcore.schema.structure import structure


@pytest.mark.parametrize(
    ("value", "tp", "made"),
    [
        (1, float, 1.0),
        ([1, 2], tuple[int, int], (1, 2)),
        (["a"], list[str], ["a"]),
        ("auto", int | Literal["auto"], "auto"),
        ([0.5], float | list[float], [0.5]),
        (3, Annotated[int | None, "a remark"], 3),
    ],
)
def test_what_a_value_becomes(value: object, tp: Any, made: object) -> None:
    found, problems = structure(value, tp, "key")
    assert (found, problems) == (made, [])
    assert type(found) is type(made)


@pytest.mark.parametrize(
    ("value", "tp", "path"),
    [
        ("1", int, "key"),
        ([1, "a"], int | tuple[int, ...], "key[1]"),
        ([1], tuple[int, int], "key"),
        ([1, "a"], list[int], "key[1]"),
        ({}, int, "key"),
    ],
)
def test_what_is_refused_and_where(value: object, tp: Any, path: str) -> None:
    found, problems = structure(value, tp, "key")
    assert found is None
    assert [problem.path for problem in problems] == [path]
