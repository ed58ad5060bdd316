"""The environment `arithmetic`: synthetic problems with one right answer."""

import re
from collections.abc import Sequence
from typing import Any

from rlcore.spi import ConfigError, DataError, EnvironmentContext, Observation, ResetResult, Row, StepResult, Turn
from rlcore.thoughts import without_thoughts
from rlcore_math.checks import check_arithmetic
from rlcore_math.config import ArithmeticConfig
from rlcore_math.problems import ProblemSpace, problem_rows

WHOLE_NUMBER = re.compile(r"-?[0-9]+")


class ArithmeticEnvironment:
    """One turn an episode; the response without its thoughts, stripped, must be the answer and nothing else."""

    def __init__(self, context: EnvironmentContext, config: ArithmeticConfig) -> None:  # noqa: ARG002
        if problems := check_arithmetic(None, config):
            raise ConfigError(problems)
        self._config = config
        self._space = ProblemSpace(config)

    def rows(self, split: str) -> Sequence[Row]:
        """Problems of "train" or "evaluation", with the fields prompt, answer and completion."""
        return problem_rows(self._space, split, self._config.prompt_format)

    async def reset(self, row: Row, seed: int) -> ResetResult:  # noqa: ARG002
        """The prompt of a row; its answer is the state."""
        prompt, answer = row.get("prompt"), row.get("answer")
        if prompt is None or not isinstance(answer, str):
            fields = ", ".join(map(repr, row))
            raise DataError(f"found a row with the fields {fields}; expected a prompt and, as text, its answer")
        observation = Observation(text=prompt) if isinstance(prompt, str) else Observation(messages=prompt)
        return ResetResult(observation=observation, state=answer)

    async def step(self, state: Any, turn: Turn) -> StepResult:
        """1.0 for the answer, else the partial credit; its components tell that apart from whether it is a whole number."""
        response = without_thoughts(turn.text, is_thinking=turn.begins_in_thought).strip()
        exact = response == state
        well_formed = WHOLE_NUMBER.fullmatch(response) is not None
        reward = 1.0 if exact else self._config.partial_credit * _share_of_digits(response, state) if well_formed else 0.0
        return StepResult(
            reward=reward,
            done=True,
            success=exact,
            reward_components={"answer": reward, "well_formed": float(well_formed)},
            metrics={"well_formed": float(well_formed)},
        )


def _share_of_digits(response: str, answer: str) -> float:
    """Digits and sign that are right, aligned at the last digit, of the longer one's."""
    right = sum(mine == theirs for mine, theirs in zip(reversed(response), reversed(answer), strict=False))
    return right / max(len(response), len(answer))
