"""Shortens texts that have more tokens than a model reads: some tokenizers take minutes for megabytes."""

from collections.abc import Callable, Sequence

CHARACTERS_PER_TOKEN = 16
"""Characters for each token of the limit. A longer text is encoded whole only where its beginning does not exceed the limit."""


def shortened(text: str, most_tokens: int, encode: Callable[[str], Sequence[int]]) -> str:
    """Return a text, or its beginning where that alone has more than twice `most_tokens`: the whole text may be encoded in
    fewer tokens than its parts."""
    beginning = text[: most_tokens * CHARACTERS_PER_TOKEN]
    return text if len(beginning) == len(text) or len(encode(beginning)) <= 2 * most_tokens else beginning
