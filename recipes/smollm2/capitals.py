"""Rewards for smollm2-capitals.toml, and for smollm2-hanging-reward.toml one that hangs on some responses."""

import re

SENTENCE = re.compile(r"([\w\s,']+)+\.")
"""Words and a full stop. Where the response does not end behind them, the search splits n characters in 2^n ways."""


def names_capital(completion: str, answer: str) -> bool:
    """Return whether the response names the capital."""
    return answer in completion


def one_sentence(completion: str, answer: str) -> bool:
    """Return whether the response is one sentence with the capital. It hangs on a longer one, and on one that was cut."""
    return SENTENCE.fullmatch(completion) is not None and answer in completion
