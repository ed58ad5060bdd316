"""Find the installed observers of the training loop by their entry points."""

from collections.abc import Collection, Iterable
from importlib.metadata import EntryPoint
from typing import Any, ClassVar

from attrs import frozen

from rlcore.registry.discovery import load_group, load_object
from rlcore.registry.entries import DescribedEntry
from rlcore.registry.plugin_errors import attributed, listing_error
from rlcore.registry.states import states_of
from rlcore.schema.problem import Note, Problem
from rlcore.spi.errors import PluginError
from rlcore.spi.observer import LOOP_OBSERVER_GROUP, LoopObserverProvider


@frozen(kw_only=True, eq=False)
class LoopObserverEntry(DescribedEntry):
    """One installed observer of the loop."""

    described_by: ClassVar[type] = LoopObserverProvider
    is_of_recipes: ClassVar[bool] = False
    role: str = "loop_observer"
    provider: LoopObserverProvider | None = None

    def paths(self) -> dict[str, str]:
        """Return the paths of the observer and of its check."""
        found = {} if self.provider is None else {"observer": self.provider.observer, "check": self.provider.check}
        return {name: path for name, path in found.items() if path is not None}

    def call(self, name: str, argument: object) -> Any:
        """Import the function of one of `paths` and call it; None without such a path. PluginError where it is not there."""
        path = self.paths().get(name)
        if path is None:
            return None
        function, problem = load_object(EntryPoint(self.name, path, LOOP_OBSERVER_GROUP), self.label)
        if problem is not None:
            raise PluginError(f"{self.label} cannot be used: {problem}")
        with attributed(f"raised by the {name} of", self.label):
            return function(argument)

    def check(self, plan: object) -> tuple[Problem | Note, ...]:
        """Return what the observer's own check finds wrong with a plan. PluginError for anything but problems and notes."""
        found = self.call("check", plan)
        with attributed("raised by the check of", self.label):
            listed = () if found is None else tuple(found) if isinstance(found, Iterable) else (found,)
        if not all(isinstance(one, Problem | Note) for one in listed):
            raise PluginError(f"{self.label}: its check returned {found!r:.200}; expected problems and notes of rlcore.spi")
        return listed


def is_disabled(name: str) -> bool:
    """Return whether the environment variable disables the installed observer of a name."""
    return any(state.kind == "disabled" for state in states_of(load_group(LoopObserverEntry, "loop_observer", name=name)))


def loop_observers(unwanted: Collection[str]) -> tuple[LoopObserverEntry, ...]:
    """Return the installed observers but for those of `unwanted` names. PluginError where one of them is not usable."""
    states = [state for state in states_of(load_group(LoopObserverEntry, "loop_observer")) if state.kind != "disabled"]
    wanted = [state for state in states if state.entry.name not in unwanted]
    if broken := [f"{state.entry.label} is {state.text}" for state in wanted if not state.is_usable]:
        raise listing_error("found loop observers that are not usable; RLCORE_DISABLE_PLUGINS disables them", broken)
    return tuple(state.entry for state in wanted)
