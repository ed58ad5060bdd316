"""Replaces "auto" in a generator's section by an installed planner's values, or refuses the recipe."""

from collections.abc import Callable
from typing import Literal

import pytest
from attrs import evolve, frozen

from rlcore.registry.discovery import Registry, discover
from rlcore.run.plan.run_plan import RunPlan
from rlcore.spi import ConfigError, PluginError
from rlcore.spi.planning import PLANNER_GROUP
from rlcore.testing.fakes.generator import FakeGeneratorConfig
from rlcore.testing.fakes.providers import FAKE_ALGORITHM, FAKE_ENVIRONMENT, FAKE_GENERATOR, FAKE_TRAINER

ON_CUDA = ("run.device=cuda", "model.dtype=float32")


@frozen(kw_only=True)
class ShareConfig(FakeGeneratorConfig):
    """A section with two shares."""

    share: float | Literal["auto"] = "auto"
    """A share of a device."""
    other: float | Literal["auto"] = "auto"
    """Another one."""


def plan_nothing(context: object, config: object) -> tuple[()]:
    return ()


@pytest.fixture
def resolved(prepared: Callable[..., RunPlan]) -> Callable[..., RunPlan]:
    """Prepares a recipe of a generator with two planned options."""
    generator = evolve(FAKE_GENERATOR, config=ShareConfig, plan=f"{__name__}:plan_nothing", planned_options={"share", "other"})
    registry = Registry.from_providers(
        {
            "trainer": [FAKE_TRAINER],
            "generator": [generator],
            "algorithm": [FAKE_ALGORITHM],
            "environment": [FAKE_ENVIRONMENT],
        }
    )
    return lambda *overrides: prepared(*overrides, registry=registry)


def test_without_a_planner_auto_is_refused_with_what_installs_one_and_all_else_that_is_wrong(resolved, installer) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(*ON_CUDA, "reference.path=none")
    paths = [problem.path for problem in caught.value.problems]
    assert {"reference", "generator.fake.other", "generator.fake.share"} <= set(paths)
    assert "pip install rlcore-plan" in str(caught.value)
    with pytest.raises(ConfigError, match="generator.fake.share") as caught:
        resolved(*ON_CUDA, "generator.fake.other=0.5")
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize(
    "overrides", [("run.device=cpu",), (*ON_CUDA, "generator.fake.other=0.5", "generator.fake.share=0.5")], ids=str
)
def test_where_nothing_is_planned_no_planner_is_needed(resolved, installer, overrides: tuple[str, ...]) -> None:
    assert resolved(*overrides).planned_options == frozenset()


PLANNER = """
from attrs import evolve

def planned(plan, keys):
    return evolve(plan, planned_options=frozenset(keys), notes=(*plan.notes, f"planned: {sorted(keys)}"))
"""


def test_the_planner_is_given_the_keys_that_say_auto(resolved, installer) -> None:
    installer.add("acme-plans", {PLANNER_GROUP: {"acme": "acme_plans:planned"}}, acme_plans=PLANNER)
    assert "planned: ['other', 'share']" in resolved(*ON_CUDA).notes
    assert "planned: ['share']" in resolved(*ON_CUDA, "generator.fake.other=0.5").notes


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("import absent_module", r"planner 'acme' \(acme-plans 1.0\).*absent_module"),
        ("planned = 3", "names a int; expected a function"),
        ("planned = lambda plan, keys: None", "returned None; expected the plan"),
    ],
)
def test_a_planner_that_cannot_be_used_is_its_packages_error(resolved, installer, source: str, told: str) -> None:
    installer.add("acme-plans", {PLANNER_GROUP: {"acme": "acme_plans:planned"}}, acme_plans=source)
    with pytest.raises(PluginError, match=told):
        resolved(*ON_CUDA)


def test_of_several_planners_one_has_to_be_disabled(resolved, installer, monkeypatch) -> None:
    for number in ("one", "two"):
        name = f"acme_{number}"
        installer.add(f"acme-{number}", {PLANNER_GROUP: {number: f"{name}:planned"}}, **{name: PLANNER})
    with pytest.raises(PluginError, match="(?s)acme-one.*acme-two"):
        resolved(*ON_CUDA)
    monkeypatch.setenv("RLCORE_DISABLE_PLUGINS", "acme-two")
    assert "planned: ['other', 'share']" in resolved(*ON_CUDA).notes
    assert discover().warnings == ()
