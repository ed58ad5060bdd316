"""A reward function in verl's form."""

from typing import Any


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,  # noqa: ARG001
) -> dict[str, Any]:
    """A score of 1.0 for the right sum, and of 0.2 for an answer of the right length; `right` becomes a metric."""
    assert data_source == "sums"
    answer = solution_str.strip()
    right = answer == ground_truth
    return {"score": 1.0 if right else 0.2 * (len(answer) == len(ground_truth)), "right": right}
