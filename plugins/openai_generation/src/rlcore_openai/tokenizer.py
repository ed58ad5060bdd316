"""Compare an endpoint's tokenizer with the recipe's: both have to decode the same tokens to the same text."""

from collections.abc import Callable, Sequence

from rlcore.model_files import config_number
from rlcore.spi import ModelSpec

Decode = Callable[[Sequence[int]], Sequence[str]]
"""The texts that tokens may stand for."""


def decoder_of(model: ModelSpec) -> Decode:
    """Return what the tokenizer of model.path makes of tokens, without and with special ones."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model.path, revision=model.revision, trust_remote_code=model.trust_remote_code)
    return lambda tokens: [str(tokenizer.decode(list(tokens), skip_special_tokens=skips)) for skips in (True, False)]


def vocab_size_of(model: ModelSpec) -> int | None:
    """Return the vocab_size of the model at model.path; None where its config.json states none."""
    if (stated := config_number(model.path, "vocab_size")) is not None:
        return stated
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model.path, revision=model.revision, trust_remote_code=model.trust_remote_code)
    found = getattr(config.get_text_config(), "vocab_size", None)
    return found if isinstance(found, int) else None


def same_text(told: str, own: Sequence[str]) -> bool:
    """Return whether one of the own texts is the one told, which may be none. Servers differ in spaces, and in characters that
    an answer breaks off within."""
    return not _letters(told) or _letters(told) in map(_letters, own)


def _letters(text: str) -> str:
    return "".join(letter for letter in text if not letter.isspace() and letter != "\N{REPLACEMENT CHARACTER}")
