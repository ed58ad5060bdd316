"""Results of Harbor's trials as results of episodes."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from attrs import evolve

from rlcore.schema.types import is_number
from rlcore.spi import EpisodeFailure, EpisodeResult, RewardError, fails_as
from rlcore_harbor.config import SECTION, HarborConfig
from rlcore_serve.agents.harbor import TIMEOUT, harbor_failure
from rlcore_workers.functions import brief

PHASES = ("environment_setup", "agent_setup", "agent_execution", "verifier")
"""Phases of a trial, whose seconds are metrics."""


def episode_result(answer: Mapping[str, Any], config: HarborConfig) -> EpisodeResult:
    """Read a trial's result. RewardError where the verifier's rewards have none of the name `reward_key`."""
    failure = _failure(answer, config)
    rewards = (answer.get("verifier_result") or {}).get("rewards") or {}
    if not rewards:
        return EpisodeResult(reward=0.0, metrics=_seconds(answer), failure=_without_reward(failure))
    if not all(map(is_number, rewards.values())):
        with fails_as("grader"):
            raise RewardError(f"the verifier's rewards are {brief(rewards)}; expected finite numbers")
    key = config.reward_key if len(rewards) > 1 else next(iter(rewards))
    if key not in rewards:
        found = ", ".join(map(repr, rewards))
        with fails_as("grader"):
            raise RewardError(f"the verifier's rewards are {found}; expected {key!r} among them, or {SECTION}.reward_key")
    return EpisodeResult(
        reward=float(rewards[key]),
        success=bool(rewards[key] >= config.success_reward),
        reward_components={str(name): float(value) for name, value in rewards.items()} if len(rewards) > 1 else {},
        metrics=_seconds(answer),
        failure=failure,
    )


def _failure(answer: Mapping[str, Any], config: HarborConfig) -> EpisodeFailure | None:
    if (reason := answer.get("not_started")) is not None:
        return EpisodeFailure(kind="environment", reason=f"the trial did not start: {reason}")
    failure = harbor_failure(answer)
    if failure is not None and failure.reason.startswith(TIMEOUT):
        return evolve(failure, masked=config.on_agent_timeout == "mask")
    return failure


def _without_reward(failure: EpisodeFailure | None) -> EpisodeFailure:
    """Return the failure of a trial without a reward, which trains in no case."""
    if failure is None:
        return EpisodeFailure(kind="grader", reason="the verifier gave no reward")
    if failure.is_trained:
        return EpisodeFailure(kind="grader", reason=f"the verifier gave no reward after {failure.reason}")
    return failure


def _seconds(answer: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of each phase that has begun and ended."""
    found = {}
    for name in PHASES:
        times = answer.get(name) or {}
        if times.get("started_at") and times.get("finished_at"):
            start, end = (datetime.fromisoformat(times[key]) for key in ("started_at", "finished_at"))
            found[f"{name}_s"] = (end - start).total_seconds()
    return found
