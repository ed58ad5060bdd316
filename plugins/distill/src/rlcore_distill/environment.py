"""The environment `unrewarded`: prompts alone, for an algorithm that learns from a teacher and not from rewards."""

from typing import Any

from rlcore import spi
from rlcore_distill.config import UnrewardedConfig


class Unrewarded:
    """One turn an episode, whose reward is 0."""

    def __init__(self, context: spi.EnvironmentContext, config: UnrewardedConfig) -> None:
        del context, config

    async def reset(self, row: spi.Row, seed: int) -> spi.ResetResult:
        """The prompt of a row: a text, or messages. DataError where it has none."""
        del seed
        prompt = row.get("prompt")
        if prompt is None:
            raise spi.DataError(f"found a row with the fields {', '.join(map(repr, row))}; expected a prompt")
        shown = spi.Observation.of_prompt(prompt, prompt_format="text", tools=row.get("tools"))
        return spi.ResetResult(observation=shown, state=None)

    async def step(self, state: Any, turn: spi.Turn) -> spi.StepResult:
        """Nothing is judged."""
        del state, turn
        return spi.StepResult(reward=0.0, done=True)

    def rows(self, split: str) -> None:
        """It brings no rows of its own."""
        del split
