"""Calls of the functions that a provider has or names, before its backend is built."""

import inspect
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any, cast

from attrs import evolve

from rlcore.registry.discovery import Entry
from rlcore.registry.hooks import arguments_problem
from rlcore.registry.plugin_errors import SLOW, attributed, fault_of, in_time, set_error_owner
from rlcore.spi.context import CheckContext, ModelSpec
from rlcore.spi.environment import ParseToolCalls
from rlcore.spi.errors import Note, PluginError, Problem
from rlcore.spi.planning import PlanContext, PlanOption
from rlcore.spi.provider import Provider
from rlcore.time_limit import FalseInterruptError, LateError, loading


def max_concurrent(entry: Entry, config: object) -> int | None:
    """Return the most concurrent calls of an environment, from its provider. PluginError where that is no such number."""
    found = _called(entry, "max_concurrent", provider_of(entry).max_concurrent, config)
    if found is not None and (type(found) is not int or found < 1):
        expected = "expected a number of calls, at least 1, or None"
        raise _own_error(entry, f"max_concurrent returned {found!r:.60}; {expected}")
    return found


def shared_kernels(entry: Entry, config: object) -> str | None:
    """The kernels that a backend computes by and others have too, by its provider. PluginError where that is no name."""
    found = _called(entry, "shared_kernels", provider_of(entry).shared_kernels, config)
    if not (found is None or isinstance(found, str)):
        raise _own_error(entry, f"shared_kernels returned {found!r:.60}; expected a name, or None")
    return found


def num_devices(entry: Entry, config: object) -> int:
    """Return the devices that one generator spans. PluginError where its provider raises."""
    return cast("int", _called(entry, "num_devices", lambda options: int(provider_of(entry).num_devices(options)), config))


def as_configured(entry: Entry, config: object) -> Entry:
    """Return a backend's entry without the capabilities that its section takes away, or with the provider's error."""
    provider = provider_of(entry)
    try:
        with loading(f"`disabled_capabilities` of {entry.label}"):
            lost = provider.capabilities & frozenset(provider.disabled_capabilities(config))
    except BaseException as error:
        return evolve(entry, error=f"its function `disabled_capabilities` raised {fault_of(error)}")
    return evolve(entry, provider=evolve(provider, capabilities=provider.capabilities - lost), taken_away=lost)


def engine_tool_parser(entry: Entry, model: ModelSpec, name: str) -> ParseToolCalls | None:
    """The parser of tools' calls that a generator's provider has under a name; None where it has none of it."""
    path = provider_of(entry).tool_parser
    if path is None:
        return None
    parser = import_object(entry, path)
    with attributed("raised by tool_parser of", entry.label), in_time(f"tool_parser of {entry.label}", SLOW):
        found = parser(name, model)
    if found is not None and not callable(found):
        raise PluginError(f"{entry.label}: tool_parser returned {found!r:.60}; expected a function of text and tools, or None")
    return cast("ParseToolCalls | None", found)


def run_check(entry: Entry, context: CheckContext, config: object) -> tuple[Problem | Note, ...]:
    """Run the provider's own check of a recipe, before anything is allocated. Return its problems; none without a check."""
    return _listed(entry, "check", (Problem, Note), context, config)


def run_planner(entry: Entry, context: PlanContext, config: object) -> tuple[PlanOption, ...]:
    """Return the layouts that a provider offers for a step's work on these devices; none without a `plan`."""
    return _listed(entry, "plan", (PlanOption,), context, config)


def import_object(entry: Entry, path: str) -> Any:
    """Import the object that a provider names as `package.module:name`. PluginError where the import fails."""
    module, _, name = path.partition(":")
    try:
        with loading(f"the import of {module}", SLOW):
            return getattr(import_module(module), name)
    except BaseException as error:
        raise PluginError(f"{entry.label} cannot be imported from {path!r}: {fault_of(error)}") from error


def provider_of(entry: Entry) -> Provider:
    """Return an entry's provider. PluginError where it has none that can be used."""
    if entry.provider is None or entry.error is not None:
        raise PluginError(f"{entry.label} is not usable: {entry.error or 'disabled'}")
    return entry.provider


def require_arguments(entry: Entry, what: str, function: Callable[..., Any]) -> None:
    """PluginError where a function or class of a plugin cannot be called with context and config."""
    if problem := arguments_problem(function, "context", "config"):
        raise PluginError(f"{entry.label}: {what} {problem}")


def _called(entry: Entry, name: str, function: Callable[..., Any], *arguments: object) -> Any:
    try:
        with loading(f"{name} of {entry.label}", SLOW):
            return function(*arguments)
    except (LateError, FalseInterruptError) as error:
        raise _own_error(entry, str(error)) from error
    except BaseException as error:
        raise _own_error(entry, f"its function `{name}` raised {fault_of(error)}") from error


def _own_error(entry: Entry, what: str) -> PluginError:
    """Return an error of a plugin's, which whoever asked it is not to blame for."""
    error = PluginError(f"{entry.label}: {what}")
    set_error_owner(error, entry.label)
    return error


def _listed(entry: Entry, field: str, kinds: tuple[type, ...], context: object, config: object) -> tuple[Any, ...]:
    """Call the function that a field of the provider names. PluginError where it returns anything but objects of `kinds`."""
    path = getattr(provider_of(entry), field)
    if path is None:
        return ()
    found = import_object(entry, path)
    if not callable(found) or inspect.iscoroutinefunction(found):
        kind = "an async def" if callable(found) else f"a {type(found).__name__}"
        raise PluginError(f"{entry.label}: {field} {path!r} is {kind}; expected a function")
    require_arguments(entry, f"{field} {path!r}", found)
    with attributed(f"raised by the {field} of", entry.label), in_time(f"the {field} of {entry.label}", SLOW):
        returned = found(context, config)
        findings = None if isinstance(returned, str) or not isinstance(returned, Iterable) else tuple(returned)
    if findings is None or not all(isinstance(one, kinds) for one in findings):
        shown = returned if findings is None else findings
        expected = f"expected a sequence of {' and '.join(kind.__name__ for kind in kinds)}"
        raise PluginError(f"{entry.label}: {field} {path!r} returned {shown!r:.200}; {expected}")
    return findings
