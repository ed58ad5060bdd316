"""Texts of observations for the policy."""

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from rlcore.spi import PluginError, RewardError
from rlcore_openenv.config import OpenEnvConfig
from rlcore_workers.functions import brief, call, load_function

OBSERVATION_KEY = "environment.openenv.observation_function"
OBSERVATION_FORM = 'a function of (observation), as "FILE.py:FUNCTION" or "MODULE:FUNCTION", not async'

Show: TypeAlias = Callable[[Mapping[str, Any]], str]
"""Empty where there is nothing to read."""


def view(config: OpenEnvConfig) -> Show:
    """Return how observations are shown. ConfigError where the function does not load."""
    if config.observation_function is not None:
        return _by_function(load_function(config.observation_function, OBSERVATION_KEY, OBSERVATION_FORM))
    if config.action == "tools":
        return lambda observation: _tool_text(observation, config.observation_fields)
    return lambda observation: fields_text(observation, config.observation_fields)


def fields_text(observation: Mapping[str, Any], names: tuple[str, ...]) -> str:
    """Return the named fields of an observation, or all: one text as it is, anything else as JSON. PluginError where one is
    missing."""
    missing = [name for name in names if name not in observation]
    if missing:
        raise PluginError(
            f"environment.openenv.observation_fields: found {', '.join(map(repr, missing))}, which the observation lacks; "
            f"expected some of its fields {', '.join(map(repr, observation)) or '(it has none)'}"
        )
    shown = {name: observation[name] for name in names or observation}
    return _as_text(next(iter(shown.values())) if len(shown) == 1 else shown) if shown else ""


def _tool_text(observation: Mapping[str, Any], names: tuple[str, ...]) -> str:
    """The text of a tool's result or error; other observations as they are without tools."""
    if "tool_name" not in observation:
        return fields_text(observation, names)
    error, result = observation.get("error"), observation.get("result")
    if error is not None:
        return f"error: {_as_text(error.get('message', error) if isinstance(error, Mapping) else error)}"
    return _as_text(result["data"] if isinstance(result, Mapping) and result.get("data") is not None else result)


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _by_function(function: Callable[..., Any]) -> Show:
    def show(observation: Mapping[str, Any]) -> str:
        said = call(function, OBSERVATION_KEY, dict(observation))
        if not isinstance(said, str):
            raise RewardError(f"{OBSERVATION_KEY} returned {brief(said)}; expected a text")
        return said

    return show
