"""A character tokenizer of 32 tokens, without a tokenizer library."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlcore.spi import DataError, Message
from rlcore.spi.arrays import Int32Array

ALPHABET = "abcdefghijklmnopqrstuvwxyz .:?\n"
END_TOKEN_ID = 0
VOCABULARY_SIZE = len(ALPHABET) + 1


class FakeTokenizer:
    """Token 0 ends a text and has no character; token i is ALPHABET[i - 1]."""

    eos_token_id: int | None = END_TOKEN_ID
    stop_token_ids: tuple[int, ...] = (END_TOKEN_ID,)
    prompt_prefix: tuple[int, ...] = ()
    chat_template: str | None = None
    vocab_size: int | None = None
    vocabulary: Mapping[str, int] | None = None

    def __init__(self) -> None:
        self._characters = np.frombuffer(("\0" + ALPHABET).encode(), np.uint8)
        self._ids = np.full(256, ALPHABET.index("?") + 1, np.uint8)
        self._ids[self._characters[1:]] = np.arange(1, VOCABULARY_SIZE)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; characters outside the alphabet become "?"."""
        ids: list[int] = self._ids[np.frombuffer(text.lower().encode("latin-1", "replace"), np.uint8)].tolist()
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Apply `encode` to each text."""
        return [self.encode(text) for text in texts]

    def encode_behind(self, texts: Sequence[str]) -> list[list[int]]:
        """Apply `encode` to each text: it adds no space."""
        return self.encode_batch(texts)

    def decode(self, tokens: Sequence[int] | Int32Array) -> str:
        """The text of token ids, end tokens left out."""
        ids = np.asarray(tokens, np.int64)
        return str(self._characters[ids[ids != END_TOKEN_ID]].tobytes(), "ascii")

    def decode_batch(self, sequences: Sequence[Sequence[int] | Int32Array]) -> list[str]:
        """Apply `decode` to each list of tokens."""
        return [self.decode(tokens) for tokens in sequences]

    def show(self, tokens: Sequence[int] | Int32Array) -> str:
        """The text of token ids; end tokens have none."""
        return self.decode(tokens)

    def render_chat(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:  # noqa: ARG002
        """A line for each message, and the beginning of the assistant's; tools are not shown."""
        return f"{self.render_answered(messages)}assistant: "

    def with_variables(self, variables: Mapping[str, Any]) -> "FakeTokenizer":
        """Itself: the template reads none. DataError where there are some."""
        if variables:
            raise DataError(f"found the variables {', '.join(variables)}; expected none")
        return self

    def render_answered(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:  # noqa: ARG002
        """A line for each message."""
        return "".join(f"{message['role']}: {message['content']}\n" for message in messages)

    def save_chat_templates(self, directory: Path, variables: Mapping[str, str | bool | int | float]) -> None:
        """Save nothing: there is no template."""
