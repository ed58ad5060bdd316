"""The entry points of a run: the functions of `tokenizers.loading` and `renderer`, whose modules are objects of the core's
protocols."""

from rlcore.run.data.text import Renderer, Tokenizers
from rlcore_text import loading
from rlcore_text import renderer as rendering


def tokenizers() -> Tokenizers:
    """Return what loads tokenizers."""
    return loading


def renderer() -> Renderer:
    """Return what renders rows and chats."""
    return rendering
