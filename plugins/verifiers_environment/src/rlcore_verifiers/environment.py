"""The environment `verifiers`: tasks, episodes and rewards of an environment written for the package of that name."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rlcore.spi import DataError, EnvironmentContext, EpisodeResult, LazyRows, RewardError, Row, SessionEndpoint, fails_as
from rlcore_verifiers.client import policy_client
from rlcore_verifiers.config import VerifiersConfig
from rlcore_verifiers.failures import EMPTY, error_kind, failure_of
from rlcore_verifiers.loading import load

KEY = "environment.verifiers.num_evaluation"


class VerifiersEnvironment:
    """Each episode is one rollout, whose model is the session."""

    def __init__(self, context: EnvironmentContext, config: VerifiersConfig) -> None:  # noqa: ARG002
        self._config = config
        self._environment = load(config)
        threshold = self._environment.pass_threshold
        self._success_reward = threshold if config.success_reward is None else config.success_reward

    def rows(self, split: str) -> Sequence[Row] | None:
        """The environment's data, prompts as it has made them; None for an evaluation without data of its own or held out.
        DataError where there is nothing to train on."""
        held_out = self._config.num_evaluation
        evaluation = self._environment.build_eval_dataset()
        if evaluation is not None and held_out:
            raise DataError(f"{KEY}: found {held_out}; expected 0, since the environment has evaluation data of its own")
        if split == "evaluation" and (evaluation is not None or not held_out):
            return None if evaluation is None else LazyRows(len(evaluation), evaluation.__getitem__)
        training = self._environment.build_dataset()
        name, size = self._config.name, 0 if training is None else len(training)
        if training is None or size <= held_out:
            raise DataError(f"{name!r} has {size} tasks to train on, {held_out} of them held out ({KEY}); expected more")
        rows = LazyRows(size, training.__getitem__)
        return rows[size - held_out :] if split == "evaluation" else rows[: size - held_out]

    async def run(self, row: Row, seed: int, session: SessionEndpoint) -> EpisodeResult:  # noqa: ARG002
        """Reward and metrics of the environment's rubric. DataError for a row of other data; RewardError where the rollout
        failed by no fault of the policy's."""
        if "example_id" not in row:
            fields = ", ".join(map(repr, row))
            raise DataError(f"found a row with the fields {fields}; expected one of the environment's own data, without [data]")
        async with policy_client(session) as client:
            # The session has the recipe's sampling; arguments that differ would be refused.
            output = await self._environment.run_rollout(dict(row), client, session.model, {})
        return episode_result(output, self._success_reward)


def episode_result(output: Mapping[str, Any], success_reward: float) -> EpisodeResult:
    """Read a rollout's output. RewardError where it failed, unless by an empty answer, or where its reward is no
    finite number."""
    error, reward = output.get("error"), output.get("reward")
    if error is not None and error["error"] != EMPTY:
        with fails_as(error_kind(error)):
            raise RewardError(f"the rollout failed: {error['error_chain_repr']}")
    if not isinstance(reward, int | float) or not math.isfinite(reward):
        with fails_as("grader"):
            raise RewardError(f"the rubric's reward is {reward!r}; expected a finite number")
    # A metric that is none of an episode, such as one of a judge that was not asked, may be NaN.
    metrics = {name: float(value) for name, value in (output.get("metrics") or {}).items() if math.isfinite(value)}
    outcome = {"empty_answer": float(error is not None), "rollout_truncated": float(bool(output.get("is_truncated")))}
    return EpisodeResult(
        reward=float(reward), success=reward >= success_reward, metrics=metrics | outcome, failure=failure_of(output)
    )
