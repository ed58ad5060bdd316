"""Reads the values of reward functions, and combines them into one reward."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from attrs import field, frozen

from rlcore.schema.types import is_number
from rlcore.spi import EpisodeFailure, RewardError
from rlcore_workers.failures import read_failure
from rlcore_workers.functions import brief

REWARD, SUCCESS, FAILURE, PARTS = "reward", "success", "failure", "part_rewards"


@frozen
class RewardOutput:
    """The output of one function for one sample."""

    name: str
    """The function's."""
    figures: Mapping[str, float]
    """`reward`, where the function says one, and whatever else it returned."""
    success: bool | None = None
    """None where it does not say."""
    failure: EpisodeFailure | None = None
    """The end of the episode, where the function says that."""
    applies: bool = True
    """False where a function of TRL's form returned None."""
    part_rewards: Mapping[int, float] = field(factory=dict)
    """Rewards of the answer's parts, by their ends in characters."""


@frozen(kw_only=True)
class Score:
    """The reward of a sample."""

    reward: float
    success: bool
    metrics: Mapping[str, float]
    components: Mapping[str, float]
    """The weighted parts of the reward; empty where it is one thing."""
    failure: EpisodeFailure | None = None
    """The first that a function says."""
    part_rewards: Mapping[int, float] = field(factory=dict)
    """The weighted rewards of the answer's parts, by their ends in characters; `reward` is without them."""


def read(name: str, value: object) -> RewardOutput:
    """Read a function's value: a finite number, or a mapping of names to such, in which `success` is a bool and `failure` says
    how the episode ended. RewardError where it is something else."""
    values: dict[Any, Any] = dict(value) if isinstance(value, Mapping) else {REWARD: value}
    success = values.pop(SUCCESS, None)
    if success is not None and not isinstance(success, bool | np.bool_):
        raise _wrong(name, f"{SUCCESS!r} as {brief(success)}", "True or False")
    failure = _failure(name, values)
    parts = values.pop(PARTS, {})
    if not isinstance(parts, Mapping) or not all(type(end) is int and is_number(one) for end, one in parts.items()):
        raise _wrong(name, f"{PARTS!r} as {brief(parts)}", "a mapping of the ends of parts, in characters, to numbers")
    for key, found in values.items():
        if not (is_number(found) or isinstance(found, bool | np.bool_)):  # True is a usual way to say that an answer is right
            what = brief(value) if not isinstance(value, Mapping) else f"{brief(found)} as {key!r}"
            raise _wrong(name, what, "a finite number, or a mapping of names to such")
    figures = {str(key): float(found) for key, found in values.items()}
    earned = {end: float(one) for end, one in parts.items()}
    return RewardOutput(name, figures, None if success is None else bool(success), failure, part_rewards=earned)


def combine(said: Sequence[RewardOutput], weights: Mapping[str, float], success_reward: float) -> Score:
    """The weighted sum of what functions say: of each its reward, or else those of its figures that `weights` names. Everything
    is a metric, but for the reward of a single function. RewardError where there is no reward, or one that `weights` names is
    missing. A sample to which no function applies is left out of training, as in TRL."""
    failure = next((one.failure for one in said if one.failure is not None), None)
    if failure is not None and not failure.is_trained:
        return Score(reward=0.0, success=False, metrics={}, components={}, failure=failure)
    if said and not any(one.applies for one in said):
        unrewarded = EpisodeFailure(kind="grader", reason="every reward function returned None")
        return Score(reward=0.0, success=False, metrics={}, components={}, failure=unrewarded)
    parts: dict[str, float] = {}
    of_parts: defaultdict[int, float] = defaultdict(float)
    metrics: dict[str, float] = {}
    for one in filter(lambda one: one.applies, said):
        if REWARD in one.figures:
            found = {one.name: one.figures[REWARD]}
        else:
            found = {name: figure for name, figure in one.figures.items() if name in weights}
        if not found:
            raise _wrong(one.name, f"a mapping of {_listed(one.figures)}", f"{REWARD!r} among them, or a name in weights")
        for name, figure in ({key: value for key, value in one.figures.items() if key != REWARD} | found).items():
            if name in metrics:
                raise _wrong(one.name, f"{name!r}, which is said already", "each name once")
            metrics[name] = figure
        parts |= found
        for end, figure in one.part_rewards.items():
            of_parts[end] += weights.get(one.name, 1.0) * figure
    absent = {one.name for one in said if not one.applies}
    if missing := [name for name in weights if name not in parts and name not in absent]:
        raise RewardError(f"weights name {_listed(missing)}, of which there is none; found {_listed(parts)}")
    weighted = {name: weights.get(name, 1.0) * figure for name, figure in parts.items()}
    reward = float(sum(weighted.values()))
    for one in said:
        if one.part_rewards and one.name in weighted:
            weighted[one.name] += weights.get(one.name, 1.0) * sum(one.part_rewards.values())
    total = reward + sum(of_parts.values())
    verdicts = [one.success for one in said if one.success is not None]
    if len(said) == 1:
        metrics = {name: figure for name, figure in metrics.items() if name != said[0].name}
    return Score(
        reward=reward,
        success=all(verdicts) if verdicts else total >= success_reward,
        metrics=metrics,
        components=weighted if len(weighted) > 1 else {},
        failure=failure,
        part_rewards=of_parts,
    )


def _failure(name: str, values: dict[Any, Any]) -> EpisodeFailure | None:
    """Take how the episode ended from what a function returned."""
    try:
        return None if (told := values.pop(FAILURE, None)) is None else read_failure(told)
    except ValueError as error:
        raise RewardError(f"the reward function {name!r} returned {FAILURE!r} with {error}") from error


def _wrong(name: str, found: str, expected: str) -> RewardError:
    return RewardError(f"the reward function {name!r} returned {found}; expected {expected}")


def _listed(names: Any) -> str:
    return ", ".join(map(repr, names)) or "nothing"
