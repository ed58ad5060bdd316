"""The environment `function`: one turn an episode, rewarded by functions of the user's."""

import asyncio
from collections.abc import Sequence
from typing import Any

from rlcore.secrets import unset_problems
from rlcore.spi import (
    CheckContext,
    ConfigError,
    DataError,
    EnvironmentContext,
    Note,
    Problem,
    ResetResult,
    Row,
    StepResult,
    Turn,
    fails_as,
)
from rlcore_rewards.call_forms import OWN, Sample
from rlcore_rewards.config import FunctionConfig
from rlcore_rewards.prompts import PROMPT, observation_of, prompt_problems
from rlcore_rewards.reward_function import KEY, RewardFunction, load_all, name_problems
from rlcore_rewards.score import RewardOutput, combine
from rlcore_rewards.worker import pool_of, say_all
from rlcore_workers.functions import FORM
from rlcore_workers.pool import default_processes

SECTION = "environment.function"
MAX_WAITING = 64
"""Calls at once where every function is an `async def`, which waits for something else."""


class FunctionBackend:
    """Shows the prompts of rows, and rewards answers by the functions that the recipe names, or that a program gives."""

    def __init__(self, context: EnvironmentContext, config: FunctionConfig) -> None:
        """Functions that a program hands over are called in this process, an ordinary one in a thread. Those that `config.path`
        names are called in worker processes, but for each `async def`."""
        self._config = config
        if not context.reward_functions:
            functions = load_all(paths_of(config))
            self._pooled = [function for function in functions if not function.is_async]
            paths = [path for path, function in zip(paths_of(config), functions, strict=True) if not function.is_async]
            self._pool = pool_of(paths, max_concurrent(config), config.pass_environment) if paths else None
            self._here = [function for function in functions if function.is_async]
        else:
            self._pooled, self._pool = [], None
            self._here = [
                RewardFunction.of(function, getattr(function, "__name__", repr(function)))
                for function in context.reward_functions
            ]
            if problems := name_problems(self._here):
                raise ConfigError(problems)

    def rows(self, split: str) -> Sequence[Row] | None:  # noqa: ARG002
        """Return None: prompts come from the recipe's data."""
        return None

    async def reset(self, row: Row, seed: int) -> ResetResult:  # noqa: ARG002
        """The row's prompt. DataError where the row has none, or lacks a field that a function takes."""
        observation = observation_of(row, self._config)
        for function in (*self._pooled, *self._here):
            if missing := function.missing(row):
                parts = ", ".join(function.form.parts)
                raise DataError(
                    f"the reward function {function.name!r} takes {', '.join(missing)}; expected any of {parts} and "
                    f"of the row's fields {', '.join(map(repr, row))}"
                )
        return ResetResult(observation=observation, state=row)

    async def step(self, state: Any, turn: Turn) -> StepResult:
        """Reward an answer by the functions. RewardError where one fails."""
        sample = Sample(prompt=state[PROMPT], completion=turn.text, row=dict(state), tokens=turn.tokens)
        calls = [self._say_here(function, sample) for function in self._here]
        pooled = [say_all(self._pool, self._pooled, sample)] if self._pool is not None else []
        said: list[RewardOutput] = []
        with fails_as("grader"):
            # None goes on behind the failure of another.
            for outcome in await asyncio.gather(*pooled, *calls, return_exceptions=True):
                if isinstance(outcome, BaseException):
                    raise outcome
                said += outcome
            score = combine(said, self._config.weights, self._config.success_reward)
        return StepResult(
            reward=score.reward,
            done=True,
            success=score.success,
            reward_components=score.components,
            metrics=score.metrics,
            failure=score.failure,
            part_rewards=score.part_rewards,
        )

    def close(self) -> None:
        """End the worker processes; the next call starts others."""
        if self._pool is not None:
            self._pool.close()

    async def _say_here(self, function: RewardFunction, sample: Sample) -> list[RewardOutput]:
        return [await (function.say_later(sample) if function.is_async else asyncio.to_thread(function.say, sample))]


def check(context: CheckContext | None, config: FunctionConfig) -> list[Problem | Note]:  # noqa: ARG001
    """Return what is wrong with the section and its functions, and a note on each function of another library's form."""
    found: list[Problem | Note] = [*prompt_problems(SECTION, config), *unset_problems(SECTION, config.pass_environment)]
    try:
        for function in load_all(paths_of(config) if config.path is not None else ()):
            if function.form != OWN:
                taken = ", ".join(function.takes)
                found.append(Note(path=KEY, text=f"{function.name} is called in the form of {function.form.name}: {taken}"))
    except ConfigError as error:
        found += error.problems
    return found


def paths_of(config: FunctionConfig) -> tuple[str, ...]:
    """The functions that a section names. ConfigError where it names none."""
    paths = (config.path,) if isinstance(config.path, str) else config.path
    if not paths:
        remedy = "A run that began with rlcore.train(…, reward=f) goes on with resume=True there."
        raise ConfigError([Problem(path=KEY, found="no function", expected=FORM, remedy=remedy)])
    return paths


def max_concurrent(config: FunctionConfig) -> int:
    """Return the number of samples that are rewarded at once."""
    if config.max_concurrent is not None:
        return config.max_concurrent
    waits = config.path is None or all(function.is_async for function in load_all(paths_of(config)))
    return MAX_WAITING if waits else default_processes()
