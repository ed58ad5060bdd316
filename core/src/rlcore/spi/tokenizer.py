"""Protocols of tokenizers: for the core, and for servers of chats."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rlcore.spi.arrays import Int32Array
from rlcore.spi.execution import TextDecoder


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
