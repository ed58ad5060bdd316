"""Reward functions in TRL's form, and a callback."""

from typing import Any


def right(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:  # noqa: ARG001
    """1.0 for each right sum."""
    return [float(completion.strip() == wanted) for completion, wanted in zip(completions, answer, strict=True)]


def right_length(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:  # noqa: ARG001
    """1.0 for each answer of the right length."""
    return [float(len(completion.strip()) == len(wanted)) for completion, wanted in zip(completions, answer, strict=True)]


class PrintRewards:
    """A line for each fifth step."""

    def on_step_end(self, step: int, metrics: dict[str, float]) -> None:
        """Print the mean reward of the step."""
        if step % 5 == 0:
            print(f"step {step}: reward {metrics['reward_mean']:.3f}")
