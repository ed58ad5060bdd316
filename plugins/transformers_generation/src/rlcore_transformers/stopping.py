"""Stop strings, looked for in each sample's text as it grows."""

from typing import Any

from tokenizers.decoders import DecodeStream

from rlcore.spi import ModelError, ModelSpec, Problem


def load_tokenizer(model: ModelSpec) -> Any:
    """The `tokenizers` tokenizer of a model; ModelError where it has none that can decode token by token."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model.path, revision=model.revision, trust_remote_code=model.trust_remote_code)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        expected = "a tokenizer with a tokenizer.json, which stop strings need"
        raise ModelError([Problem(path=model.path, found=type(tokenizer).__name__, expected=expected)])
    return backend


class StopStrings:
    """One sample's text, of which only the end is kept that a stop string could still begin in."""

    def __init__(self, tokenizer: Any, strings: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._strings = strings
        self._stream = DecodeStream(skip_special_tokens=False)
        self._kept = max(len(string) for string in strings) - 1
        self._tail = ""

    def complete(self, token: int) -> bool:
        """Return whether this next token completes a stop string."""
        text = self._tail + self._text(token)
        self._tail = text[len(text) - min(self._kept, len(text)) :]
        return any(string in text for string in self._strings)

    def _text(self, token: int) -> str:
        try:
            return self._stream.step(self._tokenizer, token) or ""
        except Exception:  # tokenizers has no class for it: bytes that are no character change what the tokens before them show
            self._stream = DecodeStream(skip_special_tokens=False)
            return self._stream.step(self._tokenizer, token) or ""
