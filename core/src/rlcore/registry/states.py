"""The state of each installed plugin: usable, or why not. A plugin that is not usable takes no name from one that is."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Generic, Literal, TypeAlias, TypeVar

from attrs import evolve, frozen

if TYPE_CHECKING:
    from rlcore.registry.discovery import Installed

InstalledT = TypeVar("InstalledT", bound="Installed")
Kind: TypeAlias = Literal["usable", "disabled", "not usable", "of another interface", "a duplicate name"]
"""What a plugin is called by the listing, by checks and by errors."""


@frozen(kw_only=True)
class PluginState(Generic[InstalledT]):
    """What a plugin is here."""

    entry: InstalledT
    kind: Kind
    reason: str | None = None
    """Why it is not usable; None where it is, and where it is disabled."""

    @property
    def is_usable(self) -> bool:
        """Whether a recipe may name it."""
        return self.kind == "usable"

    @property
    def text(self) -> str:
        """What it is and why, behind "is"."""
        return self.kind if self.reason is None else f"{self.kind}: {self.reason}"


def states_of(entries: Iterable[InstalledT]) -> tuple[PluginState[InstalledT], ...]:
    """The state of each plugin of a role, in the same order. Usable plugins that share a name are duplicates of one another."""
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
    """The state of what a name means: of the usable plugin, or of all that have the name. None where none has it."""
    named = [state for state in states if state.entry.name == name]
    for kinds in (("usable", "a duplicate name"), ("not usable", "of another interface"), ("disabled",)):
        of_kinds = [state for state in named if state.kind in kinds]
        reasons = {state.text: state for state in of_kinds}
        if len(reasons) > 1:
            told = "; ".join(f"{state.entry.origin} is {text}" for text, state in reasons.items())
            return evolve(of_kinds[0], kind="not usable", reason=told)
        if of_kinds:
            return of_kinds[0]
    return None


def entries_by_name(entries: Iterable[InstalledT]) -> dict[str, InstalledT]:
    """The plugin that each name means in a recipe, for its options. A plugin that only cannot run here keeps a name that it has
    alone; a name that several usable plugins share means none of them."""
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


def _duplicate(entries: Sequence["Installed"]) -> str:
    """Whose plugins share a name, and how to keep one of them."""
    # rlcore's own stay, where it is a third party that took the name.
    owners = sorted({entry.distribution for entry in entries}, key=lambda owner: (not owner.startswith("rlcore"), owner))
    origins = " and ".join(entry.origin for entry in entries)
    others = ", ".join(f'"{owner}"' for owner in owners[1:])
    disable = f"plugins.disable = [{others}] or RLCORE_DISABLE_PLUGINS={','.join(owners[1:])}"
    return f"{origins} provide it; keep one: {f'set {disable}, or ' if others else ''}uninstall the other"
