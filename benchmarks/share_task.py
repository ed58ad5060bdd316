"""The benchmarks' task, for every contestant: prompts of random characters, rewarded by what share of the answer's
characters comes from the alphabet's first half. It can be learned, and scoring costs nothing."""

import random

ALPHABET = "".join(chr(0x4E00 + index) for index in range(510))
PROMPT_LENGTH = 12


def reward(text: str) -> float:
    """In [0, 1]."""
    return sum(character < ALPHABET[255] for character in text) / max(len(text), 1)


def prompts() -> list[str]:
    """256 prompts, always the same."""
    source = random.Random(0)
    return ["".join(source.choices(ALPHABET, k=PROMPT_LENGTH)) for _ in range(256)]
