"""Plans the memory of environments on the first device, such as a judge model. Trainer and generator leave it free."""

from collections.abc import Iterable, Mapping

from attrs import field, frozen

from rlcore.config.recipe import Recipe
from rlcore.registry.discovery import Entry
from rlcore.registry.provider_calls import run_planner
from rlcore.run.plan.sections import plugin_config
from rlcore.spi import PlanContext

GIB = 2**30


@frozen(kw_only=True)
class EnvironmentMemory:
    """The memory of all environments of a recipe."""

    parts: Mapping[str, int] = field(factory=dict)
    """Bytes by the environment's name, where it has any there."""
    assumptions: tuple[str, ...] = ()
    """Why what one has there is not known."""

    @property
    def num_bytes(self) -> int:
        return sum(self.parts.values())

    @property
    def told(self) -> str:
        """Return each user's GiB, in words."""
        return ", ".join(f"the environment {name} has {size / GIB:.1f}" for name, size in self.parts.items())


def environment_memory(recipe: Recipe, entries: Iterable[Entry], context: PlanContext) -> EnvironmentMemory:
    """Plan the memory of these environments of a recipe. PluginError where a plan is none."""
    parts, assumptions = {}, list[str]()
    for entry in filter(has_plan, entries):
        options = run_planner(entry, context, plugin_config(recipe, entry))
        assumptions += [text for option in options for text in option.assumptions]
        if size := sum(sum(option.memory.values()) for option in options):
            parts[entry.name] = size
    return EnvironmentMemory(parts=parts, assumptions=tuple(assumptions))


def has_plan(entry: Entry) -> bool:
    """Return whether a plugin that can be used says what it takes."""
    return entry.provider is not None and entry.error is None and not entry.disabled and entry.provider.plan is not None
