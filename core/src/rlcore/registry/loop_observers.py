"""Find the installed observers of the training loop by their entry points."""

from collections.abc import Collection
from typing import ClassVar

from attrs import frozen

from rlcore.registry.called import CalledEntry
from rlcore.registry.discovery import load_group
from rlcore.registry.plugin_errors import listing_error
from rlcore.registry.states import states_of
from rlcore.spi.observer import LoopObserverProvider


@frozen(kw_only=True, eq=False)
class LoopObserverEntry(CalledEntry):
    """One installed observer of the loop."""

    described_by: ClassVar[type] = LoopObserverProvider
    is_of_recipes: ClassVar[bool] = False
    role: str = "loop_observer"
    provider: LoopObserverProvider | None = None

    def paths(self) -> dict[str, str]:
        """Return the paths of the observer and of its check."""
        found = {} if self.provider is None else {"observer": self.provider.observer, "check": self.provider.check}
        return {name: path for name, path in found.items() if path is not None}


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
