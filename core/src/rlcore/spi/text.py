"""Text of a run: what loads tokenizers, and what renders chats and rows of data sets to tokens.

In `pyproject.toml`::

    [project.entry-points."rlcore.tokenizers"]
    tekken = "my_package.provider:TEKKEN"

In `my_package/provider.py`::

    TEKKEN = TextProvider(name="tekken", spi=(2, 0), backend="my_package.tekken:tokenizers", priority=60)

The core calls the backend of each group once, without arguments, and uses what it returns for the whole run: in the group
`rlcore.tokenizers` an `rlcore.run.data.text.Tokenizers`, in `rlcore.renderers` an `rlcore.run.data.text.Renderer`.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from attrs import frozen

from rlcore.schema.printable import plain_texts
from rlcore.spi.arrays import Int32Array
from rlcore.spi.execution import TextDecoder
from rlcore.spi.provider import available


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
    unavailable: Callable[[], str | None] = available
    """A reason why it cannot be used here, with its remedy, or None. Must be quick and import nothing heavy."""


class ChatTokenizer(Protocol):
    """A tokenizer as a server of chats sees it."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a response."""

    @property
    def prompt_prefix(self) -> tuple[int, ...]:
        """Tokens that a prompt given as plain text begins with."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of exactly this text, no special tokens added."""

    def encode_behind(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text as it stands behind another one."""

    def decode(self, tokens: Sequence[int] | Int32Array) -> str:
        """Return the text of tokens, without special tokens."""

    def show(self, tokens: Sequence[int] | Int32Array) -> str:
        """Return the text of tokens, special tokens included."""

    def with_variables(self, variables: Mapping[str, Any]) -> "ChatTokenizer":
        """Return the tokenizer with further variables for its chat template. DataError where that reads none of a name."""

    def render_chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Return the messages through the chat template, up to where the assistant's answer begins. DataError where the
        template refuses them."""


class Tokenizer(ChatTokenizer, TextDecoder, Protocol):
    """The tokenizer of a run."""

    @property
    def eos_token_id(self) -> int | None:
        """Token that ends a demonstration; None where the model has none."""

    @property
    def vocab_size(self) -> int | None:
        """Tokens that the model has; None where its config.json says nothing."""

    @property
    def vocabulary(self) -> Mapping[str, int] | None:
        """Number of each token by its text; None where it cannot be listed."""

    @property
    def chat_template(self) -> str | None:
        """Text of the chat template for prompts with tools, for checks of what it contains; None where there is none."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Apply `encode` to each text."""

    def with_variables(self, variables: Mapping[str, Any]) -> "Tokenizer":
        """The tokenizer with further variables for its chat template. DataError where that reads none of a name."""

    def render_answered(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Messages of which the last is the assistant's answer through the chat template, with what that puts behind it."""

    def save_chat_templates(self, directory: Path, variables: Mapping[str, str | bool | int | float]) -> None:
        """Replace the chat templates in a model directory by this tokenizer's, with these variables as defaults."""
