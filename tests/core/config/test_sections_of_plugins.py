"""The sections of this repository's plugins: every number has a range, and what is outside is refused with its key."""

import math
import typing
from typing import Any

import attrs
import pytest

from rlcore.registry.discovery import discover
from rlcore.schema import describe, types
from rlcore.schema.structure import structure

ANY_NUMBER = {
    "ArithmeticConfig.problem_seed",
    "CalculatorConfig.problem_seed",
    "AgentConfig.success_reward",
    "FunctionConfig.success_reward",
    "JudgeConfig.success_reward",
    "RewardModelConfig.success_reward",
    "OpenEnvConfig.invalid_action_reward",
    "OpenEnvConfig.success_reward",
    "NemoGymConfig.success_reward",
    "ReasoningGymConfig.problem_seed",
    "ShapesConfig.drawing_seed",
    "TextArenaConfig.game_seed",
    "VerifiersConfig.success_reward",
}
"""Every whole number seeds something; a reward may be any."""
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
                for wrong in (-1, *((-math.inf,) if kind is float else ())):
                    _, problems = structure(stands_in | {name: kind(wrong)}, section, "section")
                    paths = {problem.path for problem in problems} - {
                        f"section.{other}" for other in stands_in if other != name
                    }
                    assert paths == {f"section.{name}"}, wrong
