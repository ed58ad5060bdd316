"""The benchmarks' task, for every contestant: prompts of random characters, rewarded by what share of the answer's
characters comes from the alphabet's first half. It can be learned, and scoring costs nothing."""

import random
from string import ascii_lowercase as ALPHABET

PROMPT_LENGTH = 12
"""Characters, each of which is a token."""


def reward(text: str) -> float:
    """In [0, 1]."""
    return sum(character in ALPHABET[:13] for character in text) / max(len(text), 1)


def prompts() -> list[str]:
    """256 prompts, always the same."""
    source = random.Random(0)
    return ["".join(source.choices(ALPHABET, k=PROMPT_LENGTH)) for _ in range(256)]
