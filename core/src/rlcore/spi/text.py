"""Text of a run: what loads tokenizers, and what renders chats and rows of data sets to tokens.

In `pyproject.toml`::

    [project.entry-points."rlcore.tokenizers"]
    tekken = "my_package.provider:TEKKEN"

In `my_package/provider.py`::

    TEKKEN = TextProvider(name="tekken", spi=(2, 0), backend="my_package.tekken:tokenizers", priority=60)

The core calls the backend of each group once, without arguments, and uses its result for the whole run. The result is an
`rlcore.run.data.text.Tokenizers` in `rlcore.tokenizers`, and an `rlcore.run.data.text.Renderer` in `rlcore.renderers`.
"""

from collections.abc import Callable

from attrs import frozen

from rlcore.schema.printable import plain_texts
from rlcore.spi.provider import always_available


@frozen(kw_only=True, field_transformer=plain_texts)
class TextProvider:
    """The description of what loads tokenizers, or of what renders chats and rows."""

    name: str
    """Equal to the entry point's name."""
    spi: tuple[int, int]
    """The SPI version that it was written for: (major, minor)."""
    backend: str
    """`package.module:function`, called once without arguments."""
    priority: int = 0
    """A run uses the usable one of the highest priority in each group."""
    unavailable: Callable[[], str | None] = always_available
    """A reason why it cannot be used here, with its remedy, or None. Must be quick and import nothing heavy."""
