"""The installed tokenizers and renderers, ranked by priority."""

from importlib import import_module
from typing import Any, ClassVar, Literal

from attrs import frozen

from rlcore.published_plugins import remedy_for
from rlcore.registry.discovery import load_group
from rlcore.registry.entries import DescribedEntry
from rlcore.registry.plugin_errors import attributed
from rlcore.registry.states import states_of
from rlcore.spi.errors import PluginError
from rlcore.spi.provider import group_of
from rlcore.spi.text import TextProvider


@frozen(kw_only=True, eq=False)
class TextEntry(DescribedEntry):
    """What loads tokenizers, or renders chats and rows, as installed."""

    described_by: ClassVar[type] = TextProvider

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
        expected = f"expected one in {group_of(role)}. {remedy_for(role)}"
        raise PluginError(f"found no usable {role}, which reads the text of a run; {expected}{listed}")
    chosen = max(usable, key=lambda entry: entry.provider.priority)
    module, _, name = chosen.provider.backend.partition(":")
    with attributed("raised as it was built:", chosen.label):
        return getattr(import_module(module), name)()
