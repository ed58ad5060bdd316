"""The installed plugins of a role, with the one that "auto" takes."""

from attrs import frozen

from rlcore.gpu import Device
from rlcore.registry.discovery import Entry, Registry
from rlcore.registry.selection import AUTO_ROLES, select_auto, wrong_device
from rlcore.registry.states import PluginState, states_of
from rlcore.spi.errors import PluginError
from rlcore.spi.provider import Role


@frozen(kw_only=True)
class Row(PluginState[Entry]):
    """One plugin's row in the listing. `reason` also says why "auto" passes over a usable one."""

    auto: bool
    """True where "auto" takes the plugin."""


def explain(registry: Registry, role: Role, device: Device) -> tuple[Row, ...]:
    """Return a row for each installed plugin of a role: its state, the reason, and whether "auto" takes it."""
    states = states_of(registry.of(role))
    try:
        chosen = select_auto(role, states, device)
    except PluginError:
        chosen = None
    return tuple(
        Row(
            entry=state.entry,
            kind=state.kind,
            reason=wrong_device(state.entry, device) if state.is_usable and role in AUTO_ROLES else state.reason,
            auto=state.entry is chosen,
        )
        for state in states
    )


def auto_error(registry: Registry, role: Role, device: Device) -> str | None:
    """Return the reason why "auto" chooses no plugin of a role; None where it chooses one."""
    try:
        select_auto(role, states_of(registry.of(role)), device)
    except PluginError as error:
        return str(error).partition("\n")[0]
    return None
