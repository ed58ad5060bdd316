"""Functions that packages add to the core, such as the planner of "auto" options and charts of finished runs."""

from pathlib import Path
from typing import Any, TypeVar

from attrs import field, fields, frozen

from rlcore.published_plugins import first_published, pip_line
from rlcore.registry.discovery import FunctionEntry, load_group
from rlcore.registry.plugin_errors import listing_error
from rlcore.registry.states import states_of
from rlcore.spi.errors import PluginError
from rlcore.spi.provider import AGENT_COLLECTOR_GROUP, REPLAY_GROUP, SESSION_SERVER_GROUP
from rlcore.spi.sessions import SessionContext, SessionServer


@frozen(kw_only=True, eq=False)
class ChartEntry(FunctionEntry):
    """One installed chart, as rlcore.spi.sink.CHART_GROUP describes it."""

    role: str = field(default="chart", init=False)


@frozen(kw_only=True, eq=False)
class PlannerEntry(FunctionEntry):
    """One installed planner, as rlcore.spi.planning.PLANNER_GROUP describes it."""

    role: str = field(default="planner", init=False)


@frozen(kw_only=True, eq=False)
class AgentCollectorEntry(FunctionEntry):
    """One installed collector of agents' episodes, as rlcore.spi.provider.AGENT_COLLECTOR_GROUP describes it."""

    role: str = field(default="agent_collector", init=False)


@frozen(kw_only=True, eq=False)
class ReplayEntry(FunctionEntry):
    """One installed reader of recorded runs, as rlcore.spi.provider.REPLAY_GROUP describes it."""

    role: str = field(default="replay", init=False)


@frozen(kw_only=True, eq=False)
class SessionServerEntry(FunctionEntry):
    """One installed session server, as rlcore.spi.provider.SESSION_SERVER_GROUP describes it."""

    role: str = field(default="session_server", init=False)


@frozen(kw_only=True, eq=False)
class CheckpointEvaluatorEntry(FunctionEntry):
    """One installed checkpoint evaluator, as rlcore.spi.observer.CHECKPOINT_EVALUATOR_GROUP describes it."""

    role: str = field(default="checkpoint_evaluator", init=False)


AnyFunction = TypeVar("AnyFunction", bound=FunctionEntry)


def session_server(context: SessionContext) -> SessionServer:
    """Build the installed session server. PluginError where there is none, or it is not usable."""
    server: SessionServer = _built(SessionServerEntry, SESSION_SERVER_GROUP, context)
    return server


def agent_collector(rollout: object, **parts: Any) -> Any:
    """Build the installed collector of agents' episodes. PluginError where there is none, or it is not usable."""
    return _built(AgentCollectorEntry, AGENT_COLLECTOR_GROUP, rollout, **parts)


def opened_replay(path: Path, plan: object, *, resume: bool) -> Any:
    """Open a recorded run that another is to repeat. PluginError where nothing installed reads it."""
    return _built(ReplayEntry, REPLAY_GROUP, path, plan, resume=resume)


def _built(kind: type[FunctionEntry], group: str, *arguments: Any, **named: Any) -> Any:
    entry = only_function(kind, group)
    if entry is None or entry.function is None:
        requirement = first_published(fields(kind).role.default)
        raise PluginError(f"found none of {group}; expected one" + (f". Run: {pip_line([requirement])}" if requirement else ""))
    return entry.function(*arguments, **named)


def only_function(kind: type[AnyFunction], group: str) -> AnyFunction | None:
    """Return the function of a group; None where none is installed. PluginError where it is not usable, or not alone."""
    states = [state for state in states_of(load_group(kind, group)) if state.kind != "disabled"]
    if len(states) == 1 and states[0].is_usable:
        return states[0].entry
    if states:
        found = f"found {len(states)} of {group}; expected one that is usable; RLCORE_DISABLE_PLUGINS disables the others"
        raise listing_error(found, (f"{state.entry.label} is {state.text}" for state in states))
    return None
