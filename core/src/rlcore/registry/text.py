"""The installed tokenizers and renderers, ranked by priority."""

from importlib import import_module
from typing import Any, ClassVar, Literal

from attrs import frozen

from rlcore.installed import DISABLE_VARIABLE
from rlcore.published_plugins import remedy_for
from rlcore.registry.discovery import load_group
from rlcore.registry.entries import DescribedEntry
from rlcore.registry.plugin_errors import attributed, listing_error
from rlcore.registry.states import states_of
from rlcore.spi.errors import PluginError
from rlcore.spi.provider import group_of
from rlcore.spi.text import TextProvider


@frozen(kw_only=True, eq=False)
class TextEntry(DescribedEntry):
    """An installed loader of tokenizers, or renderer of chats and rows."""

    described_by: ClassVar[type] = TextProvider
    is_of_recipes: ClassVar[bool] = False

    def paths(self) -> dict[str, str]:
        """Return the path of the backend."""
        return {} if self.provider is None else {"backend": self.provider.backend}


def text_backend(role: Literal["tokenizer", "renderer"]) -> Any:
    """Build the backend of a role: of its usable plugins, that of the highest priority. PluginError where there is none, with
    the reason of each that is installed and the line that installs one."""
    states = states_of(load_group(TextEntry, role))
    usable = [state.entry for state in states if state.is_usable]
    if not usable:
        listed = "".join(f"\n  - {state.entry.label} is {state.text}" for state in states)
        is_twice = any(state.kind == "a duplicate name" for state in states)
        expected = f"expected one in {group_of(role)}. {'' if is_twice else remedy_for(role)}".rstrip()
        raise PluginError(f"found no usable {role}, which reads the text of a run; {expected}{listed}")
    highest = max(entry.provider.priority for entry in usable)
    chosen, *tied = [entry for entry in usable if entry.provider.priority == highest]
    if tied:
        labels = (entry.label for entry in (chosen, *tied))
        raise listing_error(f"several have priority {highest}; {DISABLE_VARIABLE} disables the others", labels)
    module, _, name = chosen.provider.backend.partition(":")
    with attributed("raised as it was built:", chosen.label):
        return getattr(import_module(module), name)()
