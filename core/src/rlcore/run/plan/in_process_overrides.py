"""Objects that a program passes to a run besides its recipe: reward functions, an environment, rows."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import evolve, field, frozen

from rlcore.config.data import Split
from rlcore.config.load import Origin, RawRecipe
from rlcore.registry.binding import build_environment, require_environment
from rlcore.registry.discovery import Entry, Registry
from rlcore.spi import AgentEnvironment, ConfigError, Environment, EnvironmentContext, PluginError, Problem, capabilities

PYTHON = "python"
"""The recipe's name of an environment, or a source of rows, that is handed over."""


@frozen(kw_only=True, eq=False)
class InProcessOverrides:
    """Stands in for parts of a recipe, whose own keys for them are then taken out."""

    reward: Sequence[Callable[..., Any]] = ()
    environment: Environment | AgentEnvironment | None = None
    rows: Mapping[Split, Sequence[Any]] = field(factory=dict)
    origin: Origin
    """How messages call the program."""

    def __attrs_post_init__(self) -> None:
        if self.reward and self.environment is not None:
            found = "both reward and environment"
            raise ConfigError(
                [Problem(path="environment", found=found, expected="one of them: an environment rewards by itself")]
            )

    @property
    def _is_agent(self) -> bool:
        return hasattr(self.environment, "run")

    def in_place(self, raw: RawRecipe) -> RawRecipe:
        """The recipe with what is handed over, in place of what it says there itself."""
        values, origins = copy.deepcopy(dict(raw.values)), dict(raw.origins)
        if self.reward or self.environment is not None:
            section = _table(values, "environment")
            section["name"] = "function" if self.reward else PYTHON
            origins["environment", "name"] = self.origin
            if self.reward and isinstance(section.get("function"), dict):
                section["function"].pop("path", None)
        for split in self.rows:
            section = _table(_table(values, "data"), split)
            for key in ("path", "subset", "split"):
                section.pop(key, None)
            section["source"] = PYTHON
            origins["data", split, "source"] = self.origin
        return evolve(raw, values=values, origins=origins)

    def described(self, registry: Registry) -> Registry:
        """The plugins, with the kind of environment that is handed over."""
        if not self._is_agent:
            return registry
        return evolve(registry, entries=tuple(_as_agent(entry) for entry in registry.entries))

    def build(self, entry: Entry, context: EnvironmentContext, config: Any) -> Environment | AgentEnvironment:
        """The environment of the run. PluginError where the one that is handed over is none."""
        if self.environment is not None:
            require_environment(entry, self.environment)
            return self.environment
        if self.reward and (entry.provider is None or capabilities.REWARD_FUNCTIONS not in entry.provider.capabilities):
            raise PluginError(f"{entry.label} takes no functions of a program; expected one that declares `reward_functions`")
        return build_environment(entry, evolve(context, reward_functions=tuple(self.reward)), config)


def _as_agent(entry: Entry) -> Entry:
    if (entry.role, entry.name) != ("environment", PYTHON) or entry.provider is None:
        return entry
    return evolve(entry, provider=evolve(entry.provider, capabilities={capabilities.AGENT}))


def _table(values: dict[str, Any], name: str) -> dict[str, Any]:
    """The table of a name, made where there is none; what is no table stays for the converter to say."""
    table = values.setdefault(name, {})
    return table if isinstance(table, dict) else {}
