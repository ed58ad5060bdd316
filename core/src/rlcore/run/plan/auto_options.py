"""Hands "auto" in a generator's section to the installed planner; without one the recipe is refused."""

from collections.abc import Iterator, Mapping
from typing import Any

from rlcore.published_plugins import remedy_for
from rlcore.registry.run_parts import only_function
from rlcore.run.plan.run_plan import RunPlan
from rlcore.schema import describe
from rlcore.spi import PluginError, Problem

AUTO = "auto"


def with_planned_options(plan: RunPlan) -> RunPlan:
    """The plan with the planner's values in place of each "auto" that stands for one. It stays without a planner."""
    keys = _auto_keys(plan)
    planner = only_function("planner") if keys else None
    if planner is None or planner.function is None:
        return plan
    found = planner.function(plan, keys)
    if not isinstance(found, RunPlan):
        raise PluginError(f"{planner.label} returned {found!r:.60}; expected the plan of a run")
    return found


def missing_planner(plan: RunPlan) -> Iterator[Problem]:
    """Yield a problem for each "auto" that no installed planner replaces."""
    keys = _auto_keys(plan)
    if keys and only_function("planner") is None:
        install = remedy_for("planner")
        remedy = f"{install}, or set a value." if install else "Set a value."
        for key in keys:
            path = f"generator.{plan.chosen['generator'].name}.{key}"
            yield Problem(path=path, found='"auto", without a planner', expected="a value, or a planner", remedy=remedy)


def section_fields(plan: RunPlan) -> Mapping[str, Any]:
    """The fields of the generator's section by their keys."""
    cls: Any = type(plan.config("generator"))
    return describe.fields(cls)


def _auto_keys(plan: RunPlan) -> tuple[str, ...]:
    """The keys whose "auto" stands for what the generator's plan says; none on CPU, and where no trainer is."""
    entry = plan.chosen.get("generator")
    if plan.device != "cuda" or "trainer" not in plan.chosen or entry is None or entry.provider is None:
        return ()
    if entry.provider.plan is None or not entry.provider.planned_options:
        return ()
    config, known = plan.config("generator"), section_fields(plan)
    unknown = entry.provider.planned_options - known.keys()
    if unknown:
        raise PluginError(f"{entry.label}: planned_options has {', '.join(sorted(unknown))}; expected keys of its section")
    return tuple(key for key in sorted(entry.provider.planned_options) if getattr(config, known[key].name) == AUTO)
