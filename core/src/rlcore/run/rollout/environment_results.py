"""Checks that what an environment returns is what the interface says."""

import json
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np

from rlcore.lone_surrogates import lone_surrogate
from rlcore.run.data.text import renderer
from rlcore.run.rollout.failures import shown
from rlcore.spi import ContractError, EpisodeResult, Observation, ResetResult, RewardError, StepResult
from rlcore.spi.arrays import check_array

RESERVED_METRICS = ("failed", "timed_out")
"""Names below `environment/` that the core writes itself."""
LARGEST = float(np.finfo(np.float32).max)
"""Rewards are float32 in the end."""


def check_reset(result: Any, vocab_size: int | None) -> ResetResult:
    """What `reset` returned, which may hold tokens below `vocab_size`. ContractError where it is something else."""
    if not isinstance(result, ResetResult):
        raise ContractError(f"returned {type(result).__name__}; expected rlcore.spi.ResetResult")
    _check_observation(result.observation, vocab_size)
    _check_tools(result.observation)
    return result


def check_step(result: Any, vocab_size: int | None) -> StepResult:
    """What `step` returned. ContractError where it is something else, RewardError where a figure is not finite as float32."""
    if not isinstance(result, StepResult):
        raise ContractError(f"returned {type(result).__name__}; expected rlcore.spi.StepResult")
    _check_number("the reward", result.reward)
    if type(result.done) is not bool or type(result.success) is not bool:
        raise ContractError(f"returned done={shown(result.done, 40)}, success={shown(result.success, 40)}; expected bools")
    if result.done != (result.observation is None):
        given = "an observation" if result.done else "no observation"
        raise ContractError(f"returned done={result.done} and {given}; expected an observation exactly where not done")
    if result.observation is not None:
        _check_observation(result.observation, vocab_size)
        if result.observation.tools:
            raise ContractError("returned an observation with tools; expected them at reset, where the episode begins")
        if result.observation.messages is not None and (fault := renderer().reply_fault(result.observation.messages)):
            raise ContractError(f"returned an observation {fault}")
    _check_components(result.reward_components)
    _check_metrics(result.metrics)
    return result


def check_episode(result: Any) -> EpisodeResult:
    """What `run` returned. ContractError where it is something else, RewardError where a figure is not finite as float32."""
    if not isinstance(result, EpisodeResult):
        raise ContractError(f"returned {type(result).__name__}; expected rlcore.spi.EpisodeResult")
    _check_number("the reward", result.reward)
    if type(result.success) is not bool:
        raise ContractError(f"returned success={shown(result.success, 40)}; expected a bool")
    _check_components(result.reward_components)
    _check_metrics(result.metrics)
    return result


def _check_components(components: Any) -> None:
    _check_mapping("reward_components", components)
    for name, value in components.items():
        if type(value) is float and type(name) is str and name.isascii() and -LARGEST <= value <= LARGEST:
            continue  # as nearly all are: this is done several times a turn
        if not isinstance(name, str):
            raise ContractError(f"returned a reward component called {shown(name, 40)}; expected a string")
        _check_characters("a reward component called", name)
        _check_number("the reward component ", value, name)


def _check_mapping(name: str, values: Any) -> None:
    if type(values) is not dict and not isinstance(values, Mapping):  # to ask an abstract class takes its time
        raise ContractError(f"returned {type(values).__name__} as {name}; expected a mapping of names to floats")


def _check_metrics(metrics: Any) -> None:
    _check_mapping("metrics", metrics)
    for name, value in metrics.items():
        plain = type(value) is float and type(name) is str and name.isascii()
        if plain and name not in RESERVED_METRICS and -LARGEST <= value <= LARGEST:
            continue
        if not isinstance(name, str) or name in RESERVED_METRICS:
            taken = f", which is the core's own: {', '.join(RESERVED_METRICS)}" if name in RESERVED_METRICS else ""
            raise ContractError(f"returned a metric called {shown(name, 40)}{taken}; expected another name")
        _check_characters("a metric called", name)
        _check_number("the metric ", value, name)


def _check_characters(what: str, name: str) -> None:
    if half := lone_surrogate(name):
        raise ContractError(f"returned {what} {name!r}, with {half}; expected Unicode text")


def _check_number(what: str, value: object, name: str | None = None) -> None:
    """`name` is put behind `what` in messages alone: this is called once a turn at least."""
    if type(value) is float and -LARGEST <= value <= LARGEST:
        return  # before an abstract class is asked
    if isinstance(value, (float, Real)) and abs(float(value)) <= LARGEST:
        return
    called = what if name is None else f"{what}{name!r}"
    if not isinstance(value, (float, Real)):
        raise ContractError(f"returned {called} {shown(value, 40)}; expected a float")
    raise RewardError(f"returned {called} {value}; expected a finite number, as float32")


def _check_tools(observation: Observation) -> None:
    """ContractError for tools that are none, and beside anything but messages, where no chat template could show them."""
    tools, expected = (
        observation.tools,
        'expected {"type": "function", "function": {"name": …, "parameters": …}}, as JSON has it',
    )
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise ContractError(f"returned an observation with tools that are {type(tools).__name__}; expected a sequence")
    if tools and observation.messages is None:
        raise ContractError(
            "returned an observation with tools and no messages; expected messages, whose chat template shows them"
        )
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ContractError(f"returned an observation with the tool {shown(tool, 80)}; {expected}")
        try:
            json.dumps(tool, ensure_ascii=False).encode()  # half a character has no bytes
        except (TypeError, ValueError) as error:
            raise ContractError(f"returned an observation with the tool {shown(tool, 80)}: {error}; {expected}") from error


def _check_observation(observation: Any, vocab_size: int | None) -> None:
    if not isinstance(observation, Observation):
        raise ContractError(f"returned the observation {type(observation).__name__}; expected rlcore.spi.Observation")
    given = [name for name in ("messages", "text", "tokens") if getattr(observation, name) is not None]
    if len(given) != 1:
        found = " and ".join(given) or "nothing"
        raise ContractError(f"returned an observation with {found}; expected exactly one of messages, text, tokens")
    if observation.tokens is None:
        fault = renderer().prompt_fault(observation.text if observation.messages is None else observation.messages)
        if observation.text is not None and not isinstance(observation.text, str):
            fault = f"the text {shown(observation.text, 40)}"
        if fault is not None:
            raise ContractError(f"returned an observation with {fault}; expected text, or messages with role and content")
        return
    check_array("observation.tokens", observation.tokens, np.int32)
    if not len(observation.tokens) or observation.tokens.min() < 0:
        found = f"the token {observation.tokens.min()}" if len(observation.tokens) else "no tokens"
        raise ContractError(f"returned an observation with {found}; expected at least one, none below 0")
    if vocab_size is not None and observation.tokens.max() >= vocab_size:
        found = f"the token {observation.tokens.max()}"
        raise ContractError(f"returned an observation with {found}; expected tokens below {vocab_size}, the model's vocabulary")
