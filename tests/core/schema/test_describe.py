"""Types and values in words, and the docstrings beneath fields."""

import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.schema import describe


@pytest.mark.parametrize(
    ("tp", "words"),
    [
        (int, "an integer"),
        (Annotated[int, "of 64 bits"], "an integer"),
        (Path | None, "a path"),
        (int | Literal["auto"], 'an integer or "auto"'),
        (Literal["a", "b"], 'one of "a", "b"'),
        (Literal["a", None], '"a"'),
        (tuple[float, ...], "an array of numbers"),
        (tuple, "an array"),
        (list[int | str], "an array of an integer or a string"),
        (dict[str, int], "a table"),
        (Any, "a value"),
    ],
)
def test_what_may_be_written_for_a_type(tp: object, words: str) -> None:
    assert describe.expectation(tp) == words


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (True, "true"),
        (3, "3 (an integer)"),
        (0.5, "0.5 (a number)"),
        ('a"b', '"a\\"b" (a string)'),
        ([1, 2], "an array of 2"),
        ({}, "a table"),
        (None, "None"),
    ],
)
def test_what_was_written(value: object, words: str) -> None:
    assert describe.describe_value(value) == words


def test_a_long_value_is_cut() -> None:
    assert describe.describe_value(16**6000) == "a number of 24001 bits (an integer)"
    assert len(describe.describe_value("x" * 200)) == 80 + len(" (a string)")


scalars = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(max_size=10)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), st.none() | inner, max_size=3),
    max_leaves=8,
)


def without_none(value: object) -> object:
    match value:
        case dict():
            return {key: without_none(item) for key, item in value.items() if item is not None}
        case list():
            return [without_none(item) for item in value]
    return value


@settings(max_examples=100, deadline=None)
@given(value=values)
def test_a_literal_reads_back_without_keys_that_are_none(value: object) -> None:
    assert tomllib.loads(f"value = {describe.toml_literal(value)}")["value"] == without_none(value)


@pytest.mark.parametrize("value", [None, [1, None], {"a": [None]}])
def test_none_elsewhere_than_in_a_table_has_no_literal(value: object) -> None:
    with pytest.raises(ValueError, match="found None, which TOML cannot say"):
        describe.toml_literal(value)


def test_docstrings_are_inherited_and_survive_without_source() -> None:
    @attrs.frozen(kw_only=True)
    class Base:
        a: int = 1
        """Of the base."""

    @attrs.frozen(kw_only=True)
    class Child(Base):
        b: int = 2
        """Of the child,
        on two lines."""

    assert dict(describe.docs(Child)) == {"a": "Of the base.", "b": "Of the child, on two lines."}
    made = attrs.make_class("Made", {"x": attrs.field(type=int)})
    assert dict(describe.docs(made)) == {"x": ""}
