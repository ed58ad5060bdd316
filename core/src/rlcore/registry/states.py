"""The state of each installed plugin: usable, or the reason why not. Only usable plugins make a name a duplicate."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Generic, Literal, TypeAlias, TypeVar

from attrs import evolve, field, frozen

from rlcore.schema.printable import printable

if TYPE_CHECKING:
    from rlcore.registry.entries import InstalledPlugin

MAX_REASON_CHARACTERS = 2000
InstalledT = TypeVar("InstalledT", bound="InstalledPlugin")
Kind: TypeAlias = Literal["usable", "disabled", "not usable", "of another interface", "a duplicate name"]
"""The words for a plugin's state in `rlcore plugins`, in checks and in errors."""


def _shown(reason: str | None) -> str | None:
    return reason and printable(reason, MAX_REASON_CHARACTERS)


@frozen(kw_only=True)
class PluginState(Generic[InstalledT]):
    """An installed plugin with its state on this machine."""

    entry: InstalledT
    kind: Kind
    reason: str | None = field(default=None, converter=_shown)
    """Why it is not usable; None where it is, and where it is disabled."""

    @property
    def is_usable(self) -> bool:
        """True where a recipe may name the plugin."""
        return self.kind == "usable"

    @property
    def text(self) -> str:
        """The state and its reason, to follow "is" in a sentence."""
        return self.kind if self.reason is None else f"{self.kind}: {self.reason}"


def states_of(entries: Iterable[InstalledT]) -> tuple[PluginState[InstalledT], ...]:
    """Return the state of each plugin of a role, in the same order. Usable plugins that share a name are duplicates."""
    found = tuple(_state(entry) for entry in entries)
    sharing: dict[str, list[InstalledT]] = {}
    for state in found:
        if state.is_usable:
            sharing.setdefault(state.entry.name, []).append(state.entry)
    return tuple(
        evolve(state, kind="a duplicate name", reason=_duplicate(sharing[state.entry.name]))
        if state.is_usable and len(sharing[state.entry.name]) > 1
        else state
        for state in found
    )


def named_state(states: Sequence[PluginState[InstalledT]], name: str) -> PluginState[InstalledT] | None:
    """Return the state of a name's plugin: of the usable one, else of all that have the name. None for an unknown name."""
    named = [state for state in states if state.entry.name == name]
    for kinds in (("usable", "a duplicate name"), ("not usable", "of another interface"), ("disabled",)):
        of_kinds = [state for state in named if state.kind in kinds]
        reasons = {state.text: state for state in of_kinds}
        if len(reasons) > 1:
            reason = "; ".join(f"{state.entry.origin} is {text}" for text, state in reasons.items())
            return evolve(of_kinds[0], kind="not usable", reason=reason)
        if of_kinds:
            return of_kinds[0]
    return None


def entries_by_name(entries: Iterable[InstalledT]) -> dict[str, InstalledT]:
    """Return the plugin whose options a recipe's section of each name holds.

    A plugin that cannot run on this machine keeps its name where no other has it. A name of several usable plugins is left out.
    """
    sound: dict[str, list[InstalledT]] = {}
    for entry in entries:
        if not entry.disabled and entry.error is None:
            sound.setdefault(entry.name, []).append(entry)
    # Probes run only where plugins share a name.
    usable = {name: of if len(of) == 1 else [one for one in of if one.unavailable() is None] for name, of in sound.items()}
    return {name: of[0] for name, of in usable.items() if len(of) == 1}


def _state(entry: InstalledT) -> PluginState[InstalledT]:
    if entry.disabled:
        return PluginState(entry=entry, kind="disabled")
    reason = entry.error if entry.error is not None else entry.unavailable()
    if reason is None:
        return PluginState(entry=entry, kind="usable")
    return PluginState(
        entry=entry, kind="of another interface" if entry.is_of_another_interface else "not usable", reason=reason
    )


def _duplicate(entries: Sequence["InstalledPlugin"]) -> str:
    """Return the owners of plugins that share a name, and the setting that keeps one of them."""
    # The hint keeps rlcore's own plugin where a third party has taken its name.
    owners = sorted({entry.distribution for entry in entries}, key=lambda owner: (not owner.startswith("rlcore"), owner))
    origins = " and ".join(entry.origin for entry in entries)
    others = ", ".join(f'"{owner}"' for owner in owners[1:])
    disable = f"RLCORE_DISABLE_PLUGINS={','.join(owners[1:])}"
    if all(entry.is_of_recipes for entry in entries):
        disable = f"plugins.disable = [{others}] or {disable}"
    return f"{origins} provide it; keep one: {f'set {disable}, or ' if others else ''}uninstall the other"
