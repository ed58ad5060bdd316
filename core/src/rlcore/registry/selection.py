"""Select the plugin of a role: the named one, or with "auto" the usable one of the highest priority. There is no fallback."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from attrs import evolve, frozen

from rlcore.gpu import Device
from rlcore.installed import distribution_of, installed_entry_points
from rlcore.published_plugins import first_published, how_to_install, pip_line, published
from rlcore.registry.discovery import Entry, Registry, load_entry
from rlcore.registry.entries import InstalledPlugin
from rlcore.registry.plugin_errors import listing_error
from rlcore.registry.run_parts import collector
from rlcore.registry.states import PluginState, named_state, states_of
from rlcore.spi.errors import PluginError
from rlcore.spi.provider import ENTRY_POINT_GROUPS, Provider, Role
from rlcore.spi.weights import DtypeName

AUTO = "auto"
BACKEND_ROLES: tuple[Role, ...] = ("trainer", "generator")
AUTO_ROLES: tuple[Role, ...] = (*BACKEND_ROLES, "execution")
"""Roles whose plugins do the same work, so that "auto" may choose; each algorithm and environment does something else."""
State: TypeAlias = PluginState[Entry]


@frozen(kw_only=True)
class ChosenPlugin:
    """The plugin that the driver chose, as plain data for the workers to load."""

    role: Role
    name: str
    distribution: str
    version: str

    @classmethod
    def of(cls, entry: Entry) -> "ChosenPlugin":
        """Return the plain data of a selected entry."""
        return cls(role=entry.role, name=entry.name, distribution=entry.distribution, version=entry.version)


def select(
    registry: Registry, role: Role, name: str, *, device: Device, needs: Mapping[str, str], dtype: DtypeName | None = None
) -> Entry:
    """Return the plugin of a role.

    `needs` maps each capability that the recipe needs to the reason why. `dtype` is the recipe's, where it matters.

    PluginError lists every installed plugin of the role with the reason why it was not taken.
    """
    states = _states(registry, role, needs, dtype)
    return select_auto(role, states, device) if name == AUTO else _select_named(role, name, states)


def passed_over(
    registry: Registry, taken: Entry, *, device: Device, needs: Mapping[str, str], dtype: DtypeName | None = None
) -> tuple[str, ...]:
    """Return a sentence for each plugin that "auto" would have preferred to `taken`, had it been usable.

    These are plugins for the device with a higher or an unknown priority. Disabled ones are left out, and so are those whose
    name a usable plugin has.
    """
    role = taken.role
    states = _states(registry, role, needs, dtype)
    meant = {state.entry.name for state in states if state.is_usable}
    higher = [
        state
        for state in states
        if state.kind != "disabled"
        and state.entry.name not in meant
        and (state.entry.error is not None or _priority(state.entry) > _priority(taken))
        and wrong_device(state.entry, device) is None
    ]
    return tuple(
        f"{role} {taken.name!r} (priority {_priority(taken)}) is taken, as {state.entry.name!r} "
        f"({state.entry.origin if state.entry.error else f'priority {_priority(state.entry)}'}) cannot be: "
        f"{state.reason if state.kind == 'not usable' else f'it is {state.text}'}"
        for state in sorted(higher, key=lambda state: -_priority(state.entry))
    )


def require_named(key: str, name: str, entries: Sequence[InstalledPlugin]) -> None:
    """PluginError where the recipe's key names something that is not installed, or cannot be used."""
    states = states_of(entries)
    state = named_state(states, name)
    if state is None:
        role = entries[0].role if entries else ""
        hint = how_to_install(role, name, [one.entry.name for one in states])
        raise PluginError(f"{key}: {name!r} is not installed. {hint}".rstrip(". "))
    if not state.is_usable:
        raise PluginError(f"{key}: {name!r} is {state.text}")


def load_chosen(chosen: ChosenPlugin) -> Entry:
    """Load, in a worker, the plugin that the driver chose. PluginError where the worker has another version or none."""
    group = ENTRY_POINT_GROUPS[chosen.role]
    wanted = f"{chosen.role} {chosen.name!r} of {chosen.distribution} {chosen.version}"
    found = installed_entry_points().entry_points.select(group=group, name=chosen.name)
    matching = [point for point in found if distribution_of(point)[0] == chosen.distribution]
    if len(matching) != 1:
        here = ", ".join(" ".join(distribution_of(point)) for point in found) or "nothing"
        raise PluginError(
            f"the driver chose {wanted}; this worker finds {here} of that name in {group}. Install the same packages"
        )
    version = distribution_of(matching[0])[1]
    if version != chosen.version:
        raise PluginError(f"the driver chose {wanted}; this worker has version {version}. Install the same version")
    entry = load_entry(chosen.role, matching[0])
    if entry.error is not None:
        (state,) = states_of([entry])
        raise PluginError(f"the driver chose {wanted}; in this worker it is {state.text}")
    return entry


def _states(registry: Registry, role: Role, needs: Mapping[str, str], dtype: DtypeName | None) -> list[State]:
    """Return the states of a role's plugins for a recipe. A plugin that lacks a needed capability is not usable."""
    states = states_of(registry.of(role))
    return [_judged(state, state.entry.provider, needs, dtype) for state in states]


def _judged(state: State, provider: Provider | None, needs: Mapping[str, str], dtype: DtypeName | None) -> State:
    if not state.is_usable or provider is None:
        return state
    entry = state.entry
    missing = [f"{capability!r} ({why})" for capability, why in needs.items() if capability not in provider.capabilities]
    reasons = [f"lacks the capability {', '.join(missing)}"] if missing else []
    taken = [repr(capability) for capability in needs if capability in entry.taken_away]
    if taken:
        reasons.append(f"[{entry.role}.{entry.name}] takes {', '.join(taken)} away")
    if dtype is not None and dtype not in provider.dtypes:
        reasons.append(f"does not compute in {dtype} (model.dtype), only in {', '.join(sorted(provider.dtypes))}")
    return evolve(state, kind="not usable", reason="; ".join(reasons)) if reasons else state


def _select_named(role: Role, name: str, states: Sequence[State]) -> Entry:
    state = named_state(states, name)
    if state is not None and state.is_usable:
        return state.entry
    if state is None:
        problem = f"not installed. {how_to_install(role, name, [one.entry.name for one in states])}".removesuffix(". ")
    else:
        problem = state.text
    raise _error(role, f"{role} {name!r} is {problem}", states)


def select_auto(role: Role, states: Sequence[State], device: Device) -> Entry:
    """Return the usable plugin of a role with the highest priority. PluginError where there is none, or a tie."""
    if role not in AUTO_ROLES:
        raise _error(role, f"the {role} has to be named: each does something else", states)
    able = [state for state in states if state.kind in ("usable", "a duplicate name") and not wrong_device(state.entry, device)]
    if not able:
        headline = f"no usable {role} is installed for device {device}; install, enable or repair one{_hint(role, states)}"
        raise _error(role, headline, states, device)
    highest = max(_priority(state.entry) for state in able)
    top = [state for state in able if _priority(state.entry) == highest]
    for state in top:
        if not state.is_usable:
            headline = f"'auto' chooses no {role}: {state.entry.name!r} is {state.text}, or name another"
            raise _error(role, headline, states, device)
    if len(top) > 1:
        names = " and ".join(state.entry.label for state in top)
        raise _error(role, f"'auto' chooses no {role}: {names} tie at priority {highest}; name one of them", states, device)
    return top[0].entry


def _error(role: Role, headline: str, states: Sequence[State], device: Device | None = None) -> PluginError:
    if not states:
        group = ENTRY_POINT_GROUPS[role]
        first = first_published(role)
        such = f", such as by {pip_line([first])}" if first else ""
        return PluginError(f"{headline}\nNo {role} is installed: install a package with an entry point in {group}{such}.")
    lines = []
    for state in states:
        entry = state.entry
        priority = f", priority {entry.provider.priority}" if entry.provider and entry.error is None else ""
        other = wrong_device(entry, device) if device and state.is_usable else None
        lines.append(f"{entry.name} ({entry.origin}{priority}): {other or state.text}")
    return listing_error(f"{headline}\nInstalled {role}s", lines)


def _hint(role: Role, states: Sequence[State]) -> str:
    """Return the command for a role's recommended plugin where it is not installed, to follow a headline; "" otherwise."""
    recommended = next(iter(published().get(role, {}).items()), None)
    if recommended is None or recommended[0] in {state.entry.name for state in states}:
        return ""
    return f". Run: {pip_line([recommended[1]])}"


def wrong_device(entry: Entry, device: Device) -> str | None:
    """Return the reason why "auto" passes over a plugin on this device; None where it does not."""
    if entry.provider is None or device in entry.provider.devices:
        return None
    if not entry.provider.devices:
        return "has to be named"
    return f"meant for {', '.join(sorted(entry.provider.devices))}, so 'auto' passes it over on {device}; it can be named"


def _priority(entry: Entry) -> int:
    """Return a plugin's priority; 0 where the plugin has an error, so that its provider cannot be trusted."""
    return entry.provider.priority if entry.provider and entry.error is None else 0


NEEDED: tuple[Role, ...] = ("trainer", "generator", "algorithm", "environment")
"""The roles of a run with rewards."""


def missing_roles(registry: Registry) -> tuple[str, ...]:
    """Return the roles of a run with rewards that no usable plugin fills; the collector of its samples is one."""
    missing = tuple(role for role in NEEDED if not any(state.is_usable for state in states_of(registry.of(role))))
    try:
        collector("episodes")
    except PluginError:
        return (*missing, "collector")
    return missing


def install_line(roles: tuple[str, ...]) -> str | None:
    """Return the command that installs a plugin for each role; None where no such plugin is released."""
    requirements = [requirement for role in roles if (requirement := first_published(role)) is not None]
    return pip_line(requirements) if requirements else None


def missing_text(registry: Registry) -> str | None:
    """Return a line that names the missing roles and the command for them; None where no role is missing."""
    roles = missing_roles(registry)
    if not roles:
        return None
    line = install_line(roles)
    return f"missing for a run with rewards: {', '.join(roles)}{f'. Run: {line}' if line else ''}"
