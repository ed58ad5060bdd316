"""Types taken apart."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NewType

import pytest
from attrs import frozen

from rlcore.schema import types

Steps = NewType("Steps", int)


@frozen
class Section:
    size: int = 1


@pytest.mark.parametrize(
    ("tp", "kinds"),
    [
        (int, ""),
        (str, ""),
        (int | None, "union optional"),
        (int | str, "union"),
        (tuple[int, ...], "array"),
        (list, "array"),
        (frozenset[str], "array"),
        (Mapping[str, int], "mapping table"),
        (Section, "attrs table"),
        (Literal["a"], ""),
    ],
)
def test_every_type_is_of_one_kind(tp: object, kinds: str) -> None:
    found = [kind for kind in ("union", "optional", "array", "mapping", "attrs", "table") if getattr(types, f"is_{kind}")(tp)]
    assert found == kinds.split()


def test_names_and_remarks_are_taken_off() -> None:
    assert types.plain(Annotated[Steps, "at least 1"]) is int
    assert types.plain(int | None) == int | None


def test_what_is_inside_of_an_array() -> None:
    assert types.item_type(tuple[int, ...]) is int
    assert types.item_type(tuple[int, str]) == int | str
    assert types.item_type(list) is object


def test_the_innermost_types_of_a_nested_one() -> None:
    nested = Annotated[tuple[Steps | None, ...] | dict[str, list[Path]] | Section | Any, "remark"]
    assert list(types.innermost(nested)) == [int, type(None), dict[str, list[Path]], Path, Section, Any]
