"""Lengths of responses as reinforcement learning sees them: log-normal, the long tail cut at a limit."""

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlcore.spi.arrays import Int64Array

SIGMA = 0.8
"""Of the logarithm: with a mean of 795, 7 of 1,000 reach 4,096 tokens."""


def draw_lengths(number: int, *, mean: float, limit: int, seed: int) -> Int64Array:
    """int64 [number]: always the same for a seed, and with this mean (to a token) after the cut."""
    normals = np.random.default_rng(seed).standard_normal(number)
    return _lengths(normals, _scale(normals, mean, limit), limit)


def lengths_of(seeds: Int64Array, *, mean: float, limit: int) -> Int64Array:
    """int64 [N]: each sample's length, a function of its seed in [0, 2**63) alone; this mean over all seeds."""
    words = seeds.astype(np.uint64)
    low, high = (words & np.uint64(2**32 - 1)).astype(np.float64), (words >> np.uint64(32)).astype(np.float64)
    normals = np.sqrt(-2.0 * np.log((high + 0.5) / 2**31)) * np.cos(2 * np.pi * low / 2**32)  # Box and Muller 1958
    return _lengths(normals, _usual_scale(mean, limit), limit)


@lru_cache
def _usual_scale(mean: float, limit: int) -> float:
    return _scale(np.random.default_rng(0).standard_normal(2**18), mean, limit)


def _scale(normals: NDArray[Any], mean: float, limit: int) -> float:
    """That with which the lengths have this mean, which rises with it."""
    low, high = 0.0, float(limit)
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if _lengths(normals, middle, limit).mean() < mean else (low, middle)
    return low


def _lengths(normals: NDArray[Any], scale: float, limit: int) -> Int64Array:
    return np.clip(np.rint(scale * np.exp(SIGMA * normals)), max(1, limit // 256), limit).astype(np.int64)
