"""A reward for each digit of a sum."""

from typing import Any


def score(completion: str, answer: str) -> dict[str, Any]:
    """A share of 1.0 behind each right digit, but for the last; the end earns that of the last digit where all are right."""
    share = 1.0 / len(answer)
    ends = range(1, min(len(completion), len(answer)))
    parts = {end: share for end in ends if completion[end - 1] == answer[end - 1]}
    right = completion.strip() == answer
    return {"reward": share if right else 0.0, "success": right, "part_rewards": parts}
