"""The installed tokenizers and renderers, ranked by priority."""

from importlib import import_module
from typing import Any, ClassVar, Literal, TypeAlias

from attrs import field, frozen

from rlcore.published_plugins import first_published, pip_line
from rlcore.registry.discovery import load_group
from rlcore.registry.entries import DescribedEntry
from rlcore.registry.plugin_errors import attributed
from rlcore.registry.states import states_of
from rlcore.spi.errors import PluginError
from rlcore.spi.text import RENDERER_GROUP, TOKENIZER_GROUP, TextProvider

TextRole: TypeAlias = Literal["tokenizer", "renderer"]


@frozen(kw_only=True, eq=False)
class TokenizerEntry(DescribedEntry):
    """What loads tokenizers, as installed."""

    described_by: ClassVar[type] = TextProvider
    role: str = field(default="tokenizer", init=False)

    def paths(self) -> dict[str, str]:
        """Return the path of the backend."""
        return {"backend": self.provider.backend}


@frozen(kw_only=True, eq=False)
class RendererEntry(TokenizerEntry):
    """What renders chats and rows, as installed."""

    role: str = field(default="renderer", init=False)


def text_backend(role: TextRole) -> Any:
    """Build the backend of a role: of its usable plugins, that of the highest priority. PluginError where there is none, with
    the reason of each that is installed and the line that installs one."""
    kind, group = (TokenizerEntry, TOKENIZER_GROUP) if role == "tokenizer" else (RendererEntry, RENDERER_GROUP)
    states = states_of(load_group(kind, group))
    usable = [state.entry for state in states if state.is_usable]
    if not usable:
        requirement = first_published(role)
        remedy = f". Run: {pip_line([requirement])}" if requirement else ""
        listed = "".join(f"\n  - {state.entry.label} is {state.text}" for state in states)
        raise PluginError(f"found no usable {role}, which reads the text of a run; expected one in {group}{remedy}{listed}")
    chosen = max(usable, key=lambda entry: entry.provider.priority)
    module, _, name = chosen.provider.backend.partition(":")
    with attributed("raised as it was built:", chosen.label):
        return getattr(import_module(module), name)()
