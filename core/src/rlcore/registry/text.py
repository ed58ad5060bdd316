"""The installed tokenizers and renderers, ranked by priority."""

from importlib.metadata import EntryPoint
from typing import Any, ClassVar, Literal

from attrs import frozen

from rlcore.published_plugins import remedy_for
from rlcore.registry.discovery import load_object
from rlcore.registry.entries import DescribedEntry
from rlcore.registry.plugin_errors import SLOW, attributed, in_time
from rlcore.registry.ranked import highest
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
    chosen = highest(TextEntry, role, "reads the text of a run", remedy_for(role))
    assert chosen.provider is not None
    backend, problem = load_object(EntryPoint(chosen.name, chosen.provider.backend, group_of(role)), chosen.label, SLOW)
    if problem is not None:
        raise PluginError(f"{chosen.label} cannot be used: {problem}")
    with attributed("raised as it was built:", chosen.label), in_time(f"the building of {chosen.label}", SLOW):
        return backend()
