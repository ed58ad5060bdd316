"""Choose the plugin of the highest priority among those that no recipe names."""

from collections.abc import Callable
from typing import TypeVar

from rlcore.installed import DISABLE_VARIABLE
from rlcore.registry.discovery import load_group
from rlcore.registry.entries import DescribedEntry
from rlcore.registry.plugin_errors import listing_error
from rlcore.registry.states import states_of
from rlcore.spi.errors import PluginError
from rlcore.spi.provider import group_of

EntryT = TypeVar("EntryT", bound=DescribedEntry)


def highest(
    described: type[EntryT], kind: str, purpose: str, remedy: str, suits: Callable[[EntryT], bool] = lambda _: True
) -> EntryT:
    """Return the usable plugin of a kind with the highest priority, of those that suit. PluginError where there is none, with
    the reason of each that is installed and the `remedy`, or where several have that priority; `purpose` follows "which"."""
    states = states_of(load_group(described, kind))
    usable = [state.entry for state in states if state.is_usable and suits(state.entry)]
    if not usable:
        listed = "".join(f"\n  - {state.entry.label} is {state.text}" for state in states if not state.is_usable)
        is_twice = any(state.kind == "a duplicate name" for state in states)
        if any(state.kind == "disabled" for state in states):
            remedy = f"{remedy}{'. Or take' if remedy else 'Take'} one out of {DISABLE_VARIABLE}"
        expected = f"expected one in {group_of(kind)}. {'' if is_twice else remedy}".rstrip()
        raise PluginError(f"found no usable {kind}, which {purpose}; {expected}{listed}")
    most = max(entry.provider.priority for entry in usable)
    chosen, *tied = [entry for entry in usable if entry.provider.priority == most]
    if tied:
        labels = (entry.label for entry in (chosen, *tied))
        raise listing_error(f"several have priority {most}; {DISABLE_VARIABLE} disables the others", labels)
    return chosen
