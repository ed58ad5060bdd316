"""Sums of two numbers of two digits: the answer, and nothing else, earns 1."""

import random

from rlcore.spi import Observation, ResetResult, StepResult


class NewPlugin:
    def __init__(self, context, config):
        self.config = config

    def rows(self, split):
        """The problems of "train" or "evaluation", of which none is in both."""
        pairs = [(first, second) for first in range(10, 100) for second in range(10, 100)]
        random.Random(0).shuffle(pairs)
        held_out = self.config.num_evaluation
        pairs = pairs[:held_out] if split == "evaluation" else pairs[held_out : held_out + self.config.num_train]
        return [{"prompt": f"{first}+{second}=", "answer": str(first + second)} for first, second in pairs]

    async def reset(self, row, seed):
        """The beginning of an episode; `state` is what `step` is given."""
        return ResetResult(observation=Observation(text=row["prompt"]), state=row["answer"])

    async def step(self, state, turn):
        """Reward an answer. An episode of several turns returns the next observation and done=False."""
        right = turn.text.strip() == state
        return StepResult(reward=float(right), done=True, success=right)
