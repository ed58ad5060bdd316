"""Rewards for smollm2-grpo.toml: the answer of a response, and what reasoning-gym says of it."""

import re
from collections.abc import Mapping
from typing import Any

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")

WORD_PROBLEMS = "word_problems"
"""The family that make_rows.py makes itself."""


def last_number(text: str) -> str:
    """The last number in a text, without commas; empty where there is none."""
    found = NUMBER.findall(text)
    return found[-1].replace(",", "") if found else ""


def score(completion: str, entry: Mapping[str, Any]) -> dict[str, float | bool]:
    """Score the response's last number by reasoning-gym, from 0 to 1. `entry` is one of its own, or a word problem, which is
    right or wrong."""
    if entry["metadata"]["source_dataset"] == WORD_PROBLEMS:
        is_right = exact(completion, entry["answer"])
        return {"reward": float(is_right), "success": is_right}
    import reasoning_gym  # takes a second or more, and only a worker needs it

    family = reasoning_gym.get_score_answer_fn(entry["metadata"]["source_dataset"])
    value = float(family(answer=last_number(completion), entry=entry))
    return {"reward": value, "success": value == 1.0}


def exact(completion: str, answer: str) -> bool:
    """Whether the last number is the answer: the same without the package, for families whose answers are whole numbers."""
    return last_number(completion) == answer
