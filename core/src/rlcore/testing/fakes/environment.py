"""A task that a table can learn in a few steps: answer with one letter, again and again."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from attrs import frozen

from rlcore.spi import EnvironmentContext, Observation, ResetResult, Row, StepResult, Turn
from rlcore.testing.fakes.tokenizer import ALPHABET


@frozen(kw_only=True)
class FakeEnvironmentConfig:
    """Options of the fake environment."""

    target: str = "e"
    """The letter to answer with."""
    num_turns: int = 1
    """Turns of an episode."""
    num_train_rows: int = 64
    """Prompts to train on."""
    num_evaluation_rows: int = 16
    """Prompts held out."""
    prompt_length: int = 6
    """Characters of a prompt."""


class FakeEnvironment:
    """The environment backend `fake`: a turn's reward is the share of the target among its characters."""

    def __init__(self, context: EnvironmentContext, config: FakeEnvironmentConfig) -> None:
        self.config = config
        generator = np.random.default_rng(context.seed)
        letters = np.array(list(ALPHABET[:26]))
        num_rows = config.num_train_rows + config.num_evaluation_rows
        prompts = ["".join(row) for row in letters[generator.integers(0, 26, (num_rows, config.prompt_length))]]
        # A number in letters makes every prompt unlike the others, so that none of the held-out ones is trained on.
        self._rows = [
            {"prompt": f"{_in_letters(index)}{prompt}:", "completion": config.target} for index, prompt in enumerate(prompts)
        ]

    async def reset(self, row: Row, seed: int) -> ResetResult:  # noqa: ARG002
        """Show the prompt."""
        return ResetResult(observation=Observation(text=str(row["prompt"])), state=0)

    async def step(self, state: Any, turn: Turn) -> StepResult:
        """Score a turn; `state` is the number of turns before it."""
        share = turn.text.count(self.config.target) / max(len(turn.text), 1)
        done = state + 1 >= self.config.num_turns
        return StepResult(
            reward=share,
            done=done,
            observation=None if done else Observation(text=" again:"),
            state=None if done else state + 1,
            success=share > 0.5,
            reward_components={"target": share},
            metrics={"share": share},
        )

    def rows(self, split: str) -> Sequence[Mapping[str, str]] | None:
        """Prompts of "train" or "evaluation"."""
        num_train = self.config.num_train_rows
        return {"train": self._rows[:num_train], "evaluation": self._rows[num_train:]}.get(split)


def _in_letters(number: int) -> str:
    return (_in_letters(number // 26 - 1) if number >= 26 else "") + ALPHABET[number % 26]
