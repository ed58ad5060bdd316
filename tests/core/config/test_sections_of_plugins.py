"""The sections of this repository's plugins: every number has a range, and what is outside is refused with its key."""

import math
import typing
from typing import Any

import attrs
import pytest

from rlcore.config.recipe import Recipe
from rlcore.registry.discovery import discover
from rlcore.schema import describe, types
from rlcore.schema.structure import NOT_FINITE, structure

ANY_NUMBER = {
    "ArithmeticConfig.problem_seed",
    "CalculatorConfig.problem_seed",
    "ReasoningGymConfig.problem_seed",
    "ShapesConfig.drawing_seed",
    "TextArenaConfig.game_seed",
}
"""Every whole number seeds something."""
SECTIONS = sorted(
    {entry.provider.config for entry in discover().entries if entry.provider is not None}, key=lambda cls: cls.__qualname__
)


def alternatives(tp: Any) -> tuple[Any, ...]:
    return typing.get_args(tp) if types.is_union(tp) else (tp,)


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__qualname__)
def test_no_number_goes_unchecked(section: type) -> None:
    unbounded = [name for name, field in describe.fields(section).items() if {int, float} & {*alternatives(field.type)}]
    assert {f"{section.__qualname__}.{name}" for name in unbounded} <= ANY_NUMBER


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__qualname__)
def test_what_is_out_of_range_is_refused_with_its_key(section: type) -> None:
    stands_in = {name: "x" for name, field in describe.fields(section).items() if field.default is attrs.NOTHING}
    for name, field in describe.fields(section).items():
        for tp in alternatives(field.type):
            kind = types.plain(tp)
            if types.is_constrained(tp) and kind in (int, float):
                is_reward = "_reward" in name
                for wrong in (*(() if is_reward else (-1,)), *((-math.inf,) if kind is float else ())):
                    _, problems = structure(stands_in | {name: kind(wrong)}, section, "section")
                    paths = {problem.path for problem in problems} - {
                        f"section.{other}" for other in stands_in if other != name
                    }
                    assert paths == {f"section.{name}"}, wrong


FINITE = [
    (cls, name, tp)
    for cls in {*SECTIONS, *(cls for field in describe.fields(Recipe).values() for cls in types.innermost(field.type))}
    if attrs.has(cls)
    for name, field in describe.fields(cls).items()
    for tp in alternatives(field.type)
    if types.plain(tp) is float
]


def test_numbers_that_are_not_finite_are_refused_in_words_of_their_own() -> None:
    assert len(FINITE) > 20
    for cls, name, tp in FINITE:
        for wrong in (math.nan, -math.inf, math.inf):
            _, problems = structure({name: wrong}, cls, "section")
            (problem,) = [one for one in problems if one.path == f"section.{name}"] or (None,)
            if problem is None:
                assert wrong == math.inf, (cls, name, wrong)
                assert "inf" in describe.docs(cls)[name] + describe.expectation(tp), (cls, name)
                continue
            assert problem.found == str(wrong)
            assert "a finite number" in problem.expected or "finite" in problem.expected or "; inf " in problem.expected
            assert problem.remedy == NOT_FINITE
