"""The environment `agent`: a function or a program runs the episode, and says its reward."""

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from rlcore.agents.config import AgentConfig
from rlcore.agents.function import AgentClient, AgentFunction, load_function
from rlcore.agents.process import run_process
from rlcore.spi import (
    CheckContext,
    ConfigError,
    EnvironmentContext,
    EpisodeResult,
    Problem,
    RewardError,
    Row,
    SessionEndpoint,
)

SECTION = "environment.agent"


class AgentBackend:
    """Runs each episode with the agent that the recipe names."""

    def __init__(self, context: EnvironmentContext, config: AgentConfig) -> None:  # noqa: ARG002
        self._config = config
        self._function: AgentFunction | None = None
        if config.function is not None:
            self._function = load_function(config.function)

    def rows(self, split: str) -> Sequence[Row] | None:  # noqa: ARG002
        """Return None: tasks come from the recipe's data."""
        return None

    async def run(self, row: Row, seed: int, session: SessionEndpoint) -> EpisodeResult:  # noqa: ARG002
        """Return what the agent says of its episode. RewardError where it says no reward."""
        if self._function is None:
            said = await run_process(self._config.command, _environment(row, session), _as_json(row))
        else:
            client = AgentClient(session)
            try:
                said = await self._function(dict(row), client)
            finally:
                await client.close()
        return episode_result(said, self._config.success_reward)


def check(context: CheckContext | None, config: AgentConfig) -> list[Problem]:  # noqa: ARG001
    """Return what is wrong with the section."""
    if (config.function is None) == (not config.command):
        found = "neither" if config.function is None else "both"
        return [Problem(path=SECTION, found=f"{found} of function and command", expected="one of the two")]
    if config.function is None:
        if shutil.which(config.command[0]) is not None:
            return []
        expected = "a program on the PATH, or the path of one"
        return [Problem(path=f"{SECTION}.command", found=f"{config.command[0]!r}, which is no program here", expected=expected)]
    try:
        load_function(config.function)
    except ConfigError as error:
        return list(error.problems)
    return []


def episode_result(said: object, success_reward: float) -> EpisodeResult:
    """Return what an agent's reward, a number or a mapping with `reward`, stands for: `success` says whether the task is
    solved, other numbers are metrics. RewardError where there is no reward in it."""
    values: dict[str, Any] = dict(said) if isinstance(said, Mapping) else {"reward": said}
    reward, success = values.pop("reward", None), values.pop("success", None)
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
        raise RewardError(f"the agent's reward is {_shown(said)}; expected a finite number, or a mapping with `reward`")
    if success is not None and not isinstance(success, bool):
        raise RewardError(f"the agent's `success` is {_shown(success)}; expected True or False")
    odd = [name for name, value in values.items() if isinstance(value, bool) or not isinstance(value, int | float)]
    if odd:
        raise RewardError(f"the agent's {odd[0]!r} is {_shown(values[odd[0]])}; expected a number, which becomes a metric")
    return EpisodeResult(
        reward=float(reward),
        success=reward >= success_reward if success is None else success,
        metrics={str(name): float(value) for name, value in values.items()},
    )


def _environment(row: Row, session: SessionEndpoint) -> dict[str, str]:
    return {
        "OPENAI_BASE_URL": session.base_url,
        "OPENAI_API_KEY": session.api_key,
        "OPENAI_MODEL": session.model,
        "RLCORE_TASK": _as_json(row),
    }


def _as_json(row: Row) -> str:
    return json.dumps(dict(row), ensure_ascii=False, default=str)


def _shown(value: object) -> str:
    return f"{value!r:.80}"
