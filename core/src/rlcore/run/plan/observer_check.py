"""Checks, before the run, whether the packages are installed that observe its loop as the recipe asks, and what they find."""

from collections.abc import Callable, Iterator, Mapping

from rlcore.config.recipe import Recipe
from rlcore.installed import DISABLE_VARIABLE
from rlcore.published_plugins import how_to_install
from rlcore.registry.loop_observers import LoopObserverEntry, is_disabled, loop_observers
from rlcore.run.plan.run_plan import RunPlan
from rlcore.spi import Note, Problem

KEYS: Mapping[str, tuple[str, Callable[[Recipe], bool]]] = {
    "checkpoint_evaluation": ("checkpoint_evaluation", lambda recipe: recipe.checkpoint_evaluation is not None),
    "model_card": ("checkpoint.model_card", lambda recipe: recipe.checkpoint.model_card and recipe.checkpoint.export != "none"),
    "push_to_hub": ("checkpoint.push_to_hub", lambda recipe: recipe.checkpoint.push_to_hub is not None),
}
"""Key of a recipe, and whether a recipe sets it, by the name of the observer that it asks for."""


def wanted_observers(recipe: Recipe) -> tuple[LoopObserverEntry, ...]:
    """Return the installed observers that a run has. PluginError where one of them is not usable."""
    return loop_observers([name for name, (_, is_set) in KEYS.items() if not is_set(recipe)])


def observer_problems(plan: RunPlan) -> Iterator[Problem | Note]:
    """Yield the keys whose observer is not installed, and what the installed ones find wrong."""
    recipe = plan.recipe
    entries = wanted_observers(recipe)
    names = {entry.name for entry in entries}
    for name, (key, is_set) in KEYS.items():
        if is_set(recipe) and name not in names:
            remedy = how_to_install("loop_observer", name, ())
            if is_disabled(name):
                remedy = f"{DISABLE_VARIABLE} disables it: take its name out"
            if name == "model_card":
                remedy += ". Or set checkpoint.model_card = false"
            yield Problem(path=key, found="that, without a usable package for it", expected="both", remedy=remedy)
    for entry in entries:
        yield from entry.check(plan)
