"""The parts of rewards that environments name, as columns."""

from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np

from rlcore.spi.arrays import BoolArray, Float32Array


def reward_components(episodes: Sequence[Mapping[str, float]], valid: BoolArray) -> dict[str, Float32Array]:
    """float32 [N] by name, names sorted: 0.0 where one of N `episodes` has no such part, and where `valid` is False."""
    names = sorted(set(chain.from_iterable(episodes)))
    return {name: np.where(valid, [episode.get(name, 0.0) for episode in episodes], 0.0).astype(np.float32) for name in names}
