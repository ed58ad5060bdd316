"""The environment `agent`: a function or a program runs the episode, and says its reward."""

import json
import shutil
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np

from rlcore.schema.types import is_number
from rlcore.secrets import unset_problems
from rlcore.spi import (
    CheckContext,
    ConfigError,
    EnvironmentContext,
    EpisodeFailure,
    EpisodeResult,
    Problem,
    RewardError,
    RlcoreError,
    Row,
    SessionEndpoint,
    fails_as,
    failure_kind,
)
from rlcore_serve.agents.config import AgentConfig
from rlcore_serve.agents.function import AgentClient, AgentFunction, load_agent
from rlcore_serve.agents.harbor import FIELD, harbor_failure
from rlcore_serve.agents.process import run_process
from rlcore_serve.agents.variables import session_variables
from rlcore_workers.failures import read_failure
from rlcore_workers.functions import brief, place_in

SECTION = "environment.agent"
MAX_VARIABLE_BYTES = 100 * 2**10
"""Longest task that is given in a variable: Linux takes 128 KiB of one."""


class AgentBackend:
    """Runs each episode with the agent that the recipe names."""

    def __init__(self, context: EnvironmentContext, config: AgentConfig) -> None:  # noqa: ARG002
        self._config = config
        self._function: AgentFunction | None = None
        if config.function is not None:
            self._function = load_agent(config.function)

    def rows(self, split: str) -> Sequence[Row] | None:  # noqa: ARG002
        """Return None: tasks come from the recipe's data."""
        return None

    async def run(self, row: Row, seed: int, session: SessionEndpoint) -> EpisodeResult:  # noqa: ARG002
        """Return what the agent says of its episode. RewardError where it says no reward."""
        if self._function is None:
            said = await run_process(self._config.command, _environment(row, session, self._config), _as_json(row))
        else:
            client = AgentClient(session)
            try:
                said = await self._function(deepcopy(dict(row)), client)  # agents append to the messages of their task
            except RlcoreError:
                raise
            except Exception as error:
                raised = f"raised {type(error).__name__}{place_in(self._function, error)}: {error}"
                with fails_as(failure_kind(error)):
                    raise RewardError(f"the agent {raised}")  # noqa: B904 - an error with a cause shows its type alone
            finally:
                await client.close()
        return episode_result(said, self._config.success_reward)


def check(context: CheckContext | None, config: AgentConfig) -> list[Problem]:  # noqa: ARG001
    """Return what is wrong with the section."""
    if (config.function is None) == (not config.command):
        found = "neither" if config.function is None else "both"
        return [Problem(path=SECTION, found=f"{found} of function and command", expected="one of the two")]
    if problems := unset_problems(SECTION, config.pass_environment):
        return problems
    if config.function is None:
        if shutil.which(config.command[0]) is not None:
            return []
        expected = "a program on the PATH, or the path of one"
        return [Problem(path=f"{SECTION}.command", found=f"{config.command[0]!r}, which is no program here", expected=expected)]
    try:
        load_agent(config.function)
    except ConfigError as error:
        return list(error.problems)
    return []


def episode_result(said: object, success_reward: float) -> EpisodeResult:
    """Return what an agent's reward, a number or a mapping with `reward`, stands for: `success` says whether the task is
    solved, `reward_components` what the reward is made of, `failure` or Harbor's `exception_info` how the episode ended; other
    numbers are metrics. RewardError where there is no reward in it and the failure is not one without."""
    values: dict[str, Any] = dict(said) if isinstance(said, Mapping) else {"reward": said}
    failure = _failure(values)
    reward, success = values.pop("reward", None), values.pop("success", None)
    components = values.pop("reward_components", {})
    if reward is None and failure is not None and not failure.is_trained:
        reward = 0.0
    if not is_number(reward):
        raise RewardError(f"the agent's reward is {brief(said)}; expected a finite number, or a mapping with `reward`")
    if success is not None and not isinstance(success, bool | np.bool_):
        raise RewardError(f"the agent's `success` is {brief(success)}; expected True or False")
    if not isinstance(components, Mapping) or not all(map(is_number, components.values())):
        raise RewardError(f"the agent's `reward_components` are {brief(components)}; expected a mapping of finite numbers")
    odd = [name for name, value in values.items() if not is_number(value)]
    if odd:
        raise RewardError(
            f"the agent's {odd[0]!r} is {brief(values[odd[0]])}; expected a finite number, which becomes a metric"
        )
    return EpisodeResult(
        reward=float(reward),
        success=bool(reward >= success_reward if success is None else success),
        reward_components={str(name): float(value) for name, value in components.items()},
        metrics={str(name): float(value) for name, value in values.items()},
        failure=failure,
    )


def _failure(values: dict[str, Any]) -> EpisodeFailure | None:
    """Take how an episode ended from what an agent returned."""
    told, harbor = values.pop("failure", None), harbor_failure(values)
    for name in (FIELD, "step_results"):
        values.pop(name, None)
    if told is None:
        return harbor
    try:
        return read_failure(told)
    except ValueError as error:
        raise RewardError(f"the agent's `failure` has {error}") from error


def _environment(row: Row, session: SessionEndpoint, config: AgentConfig) -> dict[str, str]:
    task = _as_json(row)
    shown = {"RLCORE_TASK": task} if len(task) <= MAX_VARIABLE_BYTES else {}
    return session_variables(session, config.pass_environment) | shown


def _as_json(row: Row) -> str:
    return json.dumps(dict(row), default=str)
