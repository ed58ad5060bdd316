"""Rewards of a group's samples: whether they differ, and the columns of their named components."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Literal, TypeAlias

import numpy as np

from rlcore.spi.arrays import BoolArray, Float32Array

RELATIVE_RESOLUTION = 1e-6
"""Rewards that differ by no more than this share of their magnitude are equal: about eight float32 roundings."""
SMALLEST_DIFFERENCE = 1e-12
"""Rewards that differ by no more than this are equal whatever their magnitude: parts of a reward that cancel, of turns or of
functions, leave roundings, such as 0.1 + 0.2 - 0.3, which is not 0."""

Compared: TypeAlias = Literal["rewards", "turn_rewards", "reward_components"]
"""As AlgorithmNeeds.compares."""


def has_reward_variance(
    rewards: Sequence[Sequence[float]], components: Sequence[Mapping[str, float]], compared: Compared
) -> bool:
    """Whether a comparison of the samples of a group, given what each earned by its turns, and by the parts of its reward that
    have names, has anything to say. False of a single sample, and of none."""
    # Without parts there is nothing to go by but the whole; the algorithm then says that they are missing.
    if compared == "rewards" or (compared == "reward_components" and not any(components)):
        return differ([sum(of_turns) for of_turns in rewards])
    if compared == "reward_components":
        return any(differ([one.get(name, 0.0) for one in components]) for name in set(chain.from_iterable(components)))
    num_turns = max(map(len, rewards), default=0)
    return any(differ([sum(of_turns[turn:]) for of_turns in rewards if turn < len(of_turns)]) for turn in range(num_turns))


def differ(rewards: Sequence[float]) -> bool:
    """Whether rewards differ by more than roundings, such as that of 0.1 + 0.2. False of a single one, and of none."""
    if not rewards:
        return False
    return max(rewards) - min(rewards) > max(RELATIVE_RESOLUTION * max(map(abs, rewards)), SMALLEST_DIFFERENCE)


def reward_components(episodes: Sequence[Mapping[str, float]], valid: BoolArray) -> dict[str, Float32Array]:
    """float32 [N] by name, names sorted: 0.0 where one of N `episodes` has no such part, and where `valid` is False."""
    names = sorted(set(chain.from_iterable(episodes)))
    return {name: np.where(valid, [episode.get(name, 0.0) for episode in episodes], 0.0).astype(np.float32) for name in names}
