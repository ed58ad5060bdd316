"""Results of Harbor's trials, as the program of the trials sends them, and what they become."""

from typing import Any

import pytest
from attrs import evolve

from rlcore.spi import EpisodeFailure, EpisodeResult, RewardError
from rlcore_harbor.config import HarborConfig
from rlcore_harbor.results import episode_result

TIMES = {"started_at": "2026-11-30T10:00:00Z", "finished_at": "2026-11-30T10:00:01.500000Z"}


def rewarded(**rewards: float) -> dict[str, Any]:
    return {"verifier_result": {"rewards": rewards}}


def failed(name: str) -> dict[str, Any]:
    return {"exception_info": {"exception_type": name, "exception_message": "why"}}


RESULTS: dict[str, tuple[dict[str, Any], dict[str, Any], float, EpisodeFailure | None]] = {
    "the only reward": (rewarded(accuracy=0.5), {}, 0.5, None),
    "the reward among several": (rewarded(form=0.25, reward=1.0), {}, 1.0, None),
    "a reward by its name": (rewarded(form=0.25, reward=1.0), {"reward_key": "form"}, 0.25, None),
    "an agent that fails has its reward": (
        rewarded(reward=1.0) | failed("NonZeroAgentExitCodeError"),
        {},
        1.0,
        EpisodeFailure(kind="policy", reason="NonZeroAgentExitCodeError: why"),
    ),
    "an agent that takes too long is masked": (
        rewarded(reward=1.0) | failed("AgentTimeoutError"),
        {},
        1.0,
        EpisodeFailure(kind="limit", reason="AgentTimeoutError: why", masked=True),
    ),
    "an agent that takes too long trains": (
        rewarded(reward=1.0) | failed("AgentTimeoutError"),
        {"on_agent_timeout": "train"},
        1.0,
        EpisodeFailure(kind="limit", reason="AgentTimeoutError: why"),
    ),
    "an agent that takes too long has no reward": (
        failed("AgentTimeoutError"),
        {"on_agent_timeout": "train"},
        0.0,
        EpisodeFailure(kind="grader", reason="the verifier gave no reward after AgentTimeoutError: why"),
    ),
    "a verifier that takes too long": (
        failed("VerifierTimeoutError"),
        {},
        0.0,
        EpisodeFailure(kind="grader", reason="VerifierTimeoutError: why"),
    ),
    "a sandbox that is not built": (
        failed("SandboxBuildFailedError"),
        {},
        0.0,
        EpisodeFailure(kind="infrastructure", reason="SandboxBuildFailedError: why"),
    ),
    "a step that fails": (
        {"step_results": [{"exception_info": None}, failed("VerifierTimeoutError")]},
        {},
        0.0,
        EpisodeFailure(kind="grader", reason="VerifierTimeoutError: why"),
    ),
    "a trial that does not start": (
        {"not_started": "ValueError: no such agent"},
        {},
        0.0,
        EpisodeFailure(kind="environment", reason="the trial did not start: ValueError: no such agent"),
    ),
    "a verifier without a reward": ({}, {}, 0.0, EpisodeFailure(kind="grader", reason="the verifier gave no reward")),
}


@pytest.mark.parametrize("name", RESULTS)
def test_a_trial_becomes_an_episode(name: str) -> None:
    answer, options, reward, failure = RESULTS[name]
    result = episode_result(answer, HarborConfig(**options))
    assert (result.reward, result.failure) == (reward, failure)


def test_several_rewards_are_components() -> None:
    result = episode_result(rewarded(form=0.25, reward=1.0), HarborConfig())
    assert (result.success, result.reward_components) == (True, {"form": 0.25, "reward": 1.0})
    alone = episode_result(rewarded(reward=0.5), HarborConfig(success_reward=0.5))
    assert (alone.success, alone.reward_components) == (True, {})


def test_seconds_of_phases_are_metrics() -> None:
    found: EpisodeResult = episode_result(rewarded(reward=1.0) | {"verifier": TIMES, "agent_setup": None}, HarborConfig())
    assert found.metrics == {"verifier_s": 1.5}


def test_rewards_without_the_named_one_are_an_error() -> None:
    config = evolve(HarborConfig(), reward_key="total")
    with pytest.raises(RewardError, match=r"'form', 'value'.*'total'.*environment\.harbor\.reward_key"):
        episode_result(rewarded(form=1.0, value=0.0), config)
    with pytest.raises(RewardError, match="nan"):
        episode_result(rewarded(reward=float("nan")), config)
