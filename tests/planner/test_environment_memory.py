"""What environments have on a device is asked of their plans."""

from collections.abc import Callable, Sequence
from typing import Any

from attrs import evolve
from trainer_plans import plan_context

from rlcore.registry.discovery import Registry
from rlcore.spi import PlanContext, PlanOption
from rlcore.testing.fakes.providers import FAKE_ENVIRONMENT
from rlcore_plan.environment_memory import environment_memory, has_plan


def plan_judge(context: PlanContext, config: object) -> Sequence[PlanOption]:
    """As much as a step has sequences, in MiB, and half of it."""
    size = context.num_sequences * 2**20
    return [PlanOption(memory={"weights": size, "work": size // 2}, seconds={})]


def plan_unknown(context: PlanContext, config: object) -> Sequence[PlanOption]:
    return [PlanOption(memory={}, seconds={}, assumptions=("Nobody knows.",))]


def plan_nothing(context: PlanContext, config: object) -> Sequence[PlanOption]:
    return []


JUDGE = evolve(FAKE_ENVIRONMENT, name="judge", plan=f"{__name__}:plan_judge")
UNKNOWN = evolve(FAKE_ENVIRONMENT, name="unknown", plan=f"{__name__}:plan_unknown")
NOTHING = evolve(FAKE_ENVIRONMENT, name="nothing", plan=f"{__name__}:plan_nothing")


def test_the_parts_of_all_are_added_up_by_name(prepared: Callable[..., Any]) -> None:
    recipe = prepared().recipe
    registry = Registry.from_providers({"environment": [FAKE_ENVIRONMENT, JUDGE, UNKNOWN, NOTHING]})
    entries = registry.of("environment")
    assert {entry.name for entry in entries if has_plan(entry)} == {"judge", "unknown", "nothing"}
    found = environment_memory(recipe, entries, plan_context())
    assert found.parts == {"judge": 768 * 2**20}
    assert (found.num_bytes, found.assumptions) == (768 * 2**20, ("Nobody knows.",))
    assert found.told == "the environment judge has 0.8"
    disabled = [evolve(entry, disabled=True) for entry in entries]
    assert environment_memory(recipe, disabled, plan_context()).parts == {}
