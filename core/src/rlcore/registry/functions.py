"""Functions that packages add to the core: the planner of "auto" options, and charts of finished runs."""

from typing import TypeVar

from attrs import field, frozen

from rlcore.registry.discovery import FunctionEntry, load_group
from rlcore.registry.plugin_errors import listing_error
from rlcore.registry.states import states_of


@frozen(kw_only=True, eq=False)
class ChartEntry(FunctionEntry):
    """One installed chart, as rlcore.spi.sink.CHART_GROUP describes it."""

    role: str = field(default="chart", init=False)


@frozen(kw_only=True, eq=False)
class PlannerEntry(FunctionEntry):
    """One installed planner, as rlcore.spi.planning.PLANNER_GROUP describes it."""

    role: str = field(default="planner", init=False)


AnyFunction = TypeVar("AnyFunction", bound=FunctionEntry)


def only_function(kind: type[AnyFunction], group: str) -> AnyFunction | None:
    """Return the function of a group; None where none is installed. PluginError where it is not usable, or not alone."""
    states = [state for state in states_of(load_group(kind, group)) if state.kind != "disabled"]
    if len(states) == 1 and states[0].is_usable:
        return states[0].entry
    if states:
        found = f"found {len(states)} of {group}; expected one that is usable; RLCORE_DISABLE_PLUGINS disables the others"
        raise listing_error(found, (f"{state.entry.label} is {state.text}" for state in states))
    return None
