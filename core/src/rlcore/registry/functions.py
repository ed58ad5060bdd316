"""Functions that packages add to the core, by their kind, such as planner, chart, session_server and importer."""

from collections.abc import Callable
from typing import Any, ClassVar

from attrs import evolve, frozen

from rlcore.published_plugins import remedy_for
from rlcore.registry.discovery import load_group
from rlcore.registry.entries import Installed
from rlcore.registry.plugin_errors import listing_error
from rlcore.registry.states import PluginState, states_of
from rlcore.spi.errors import PluginError
from rlcore.spi.provider import group_of


@frozen(kw_only=True, eq=False)
class FunctionEntry(Installed):
    """One installed function."""

    is_of_recipes: ClassVar[bool] = False
    function: Callable[..., Any] | None = None
    """None where it is disabled or could not be imported."""

    def holding(self, loaded: object) -> "FunctionEntry":
        """Return this entry with the object that it names, and with the object's error."""
        if not callable(loaded):
            return evolve(self, error=f"the entry point names a {type(loaded).__name__}; expected a function")
        return evolve(self, function=loaded)


def functions(kind: str, **selected: Any) -> tuple[PluginState[FunctionEntry], ...]:
    """Return the state of each installed function of a kind, of those alone that `selected` names, such as by `name`."""
    return states_of(load_group(FunctionEntry, kind, **selected))


def only_function(kind: str) -> FunctionEntry | None:
    """Return the function of a kind; None where none is installed. PluginError where it is not usable, or not alone."""
    states = [state for state in functions(kind) if state.kind != "disabled"]
    if len(states) == 1 and states[0].is_usable:
        return states[0].entry
    if states:
        found = (
            f"found {len(states)} of {group_of(kind)}; expected one that is usable; RLCORE_DISABLE_PLUGINS disables the others"
        )
        raise listing_error(found, (f"{state.entry.label} is {state.text}" for state in states))
    return None


def call_function(kind: str, *arguments: object, **named: object) -> Any:
    """Call the only function of a kind. PluginError where there is none, or it is not usable."""
    entry = only_function(kind)
    if entry is None or entry.function is None:
        raise PluginError(f"found no {kind.replace('_', ' ')}; expected one in {group_of(kind)}. {remedy_for(kind)}")
    return entry.function(*arguments, **named)
