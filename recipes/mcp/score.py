"""The reward of a product: an answer counts behind a call alone."""

from typing import Any


def score(completion: str, answer: str, tool_calls: list[dict[str, Any]]) -> float:
    """Return 1 for the right answer behind a call without an error, else 0."""
    has_called = any(not call["is_error"] for call in tool_calls)
    return float(has_called and completion.strip() == answer)
