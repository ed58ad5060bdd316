"""The environment `reasoning_gym`: problems that reasoning-gym makes and scores."""

import json
from collections.abc import Sequence
from typing import Any

from rlcore.spi import (
    ConfigError,
    DataError,
    EnvironmentContext,
    EpisodeFailure,
    Observation,
    ResetResult,
    Row,
    StepResult,
    Turn,
    fails_as,
)
from rlcore_reasoning_gym.answers import answer_of
from rlcore_reasoning_gym.checks import check_reasoning_gym
from rlcore_reasoning_gym.config import ReasoningGymConfig
from rlcore_reasoning_gym.problems import Problems
from rlcore_reasoning_gym.scoring import Score, Scorer

TOO_SLOW = "its answer took more processor time to score than environment.reasoning_gym.scoring_timeout_s"


class ReasoningGymEnvironment:
    """One turn an episode; its reward is the score of the answer."""

    def __init__(self, context: EnvironmentContext, config: ReasoningGymConfig) -> None:  # noqa: ARG002 - problems have their own seed
        if problems := check_reasoning_gym(None, config):
            raise ConfigError(problems)
        self._config = config
        self._problems = Problems(config)
        self._scorer = Scorer(config)

    def rows(self, split: str) -> Sequence[Row]:
        """Problems of "train" or "evaluation", with the fields prompt, family, level and entry, and, where the package knows an
        answer, answer and completion."""
        return self._problems.rows(split)

    async def reset(self, row: Row, seed: int) -> ResetResult:  # noqa: ARG002
        """The prompt of a row; what its answer is scored by is the state."""
        prompt, family, entry = row.get("prompt"), row.get("family"), row.get("entry")
        if prompt is None or family not in self._config.families or not isinstance(entry, dict):
            fields = ", ".join(map(repr, row))
            expected = f"a prompt, a family of {', '.join(self._config.families)}, and its entry, as the environment makes them"
            raise DataError(f"found a row with the fields {fields} and the family {family!r}; expected {expected}")
        observation = Observation(text=prompt) if isinstance(prompt, str) else Observation(messages=prompt)
        return ResetResult(observation=observation, state=(family, row.get("level"), entry))

    async def step(self, state: Any, turn: Turn) -> StepResult:
        """The score of the answer: 0.0 where the response has none, success where it is all of 1."""
        family, level, entry = state
        answer = answer_of(turn.text, self._config, is_thinking=turn.begins_in_thought)
        found = Score()
        if answer is not None:
            options = json.dumps(dict(self._config.families[family].options))
            request = {"family": family, "level": level, "options": options, "answer": answer, "entry": entry}
            with fails_as("grader"):
                found = await self._scorer.score(request)
        name = f"score_{family}" if level is None else f"score_{family}_level_{level}"
        metrics = {
            name: found.score,
            "answered": float(answer is not None),
            "scoring_timed_out": float(found.timed_out),
            "scoring_failed": float(found.failed),
        }
        reason = TOO_SLOW if found.timed_out else "the rule of its family fails over its answer" if found.failed else None
        failure = None if reason is None else EpisodeFailure(kind="policy", reason=reason)
        return StepResult(reward=found.score, done=True, success=found.score >= 1.0, metrics=metrics, failure=failure)

    def close(self) -> None:
        """End the processes that score answers; the next call starts others."""
        self._scorer.close()
