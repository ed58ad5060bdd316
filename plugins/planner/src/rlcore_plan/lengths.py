"""Estimates the lengths of answers for plans: log-normal, cut at the limit, with a given mean."""

import math
from statistics import NormalDist

SIGMA = 0.8
"""The spread of the logarithm of lengths, as in the benchmarks."""
NUM_QUANTILES = 128
NUM_HALVINGS = 60


def response_lengths(mean: float, limit: int) -> tuple[float, ...]:
    """Quantiles of equal weight, from the shortest to the longest, with this mean; all `limit` where the mean is no less."""
    if mean >= limit:
        return (float(limit),) * NUM_QUANTILES
    normal = NormalDist()
    spread = [normal.inv_cdf((number + 0.5) / NUM_QUANTILES) for number in range(NUM_QUANTILES)]
    factors = [math.exp(SIGMA * value) for value in spread]
    low, high = 0.0, float(limit) * 100
    for _ in range(NUM_HALVINGS):
        middle = (low + high) / 2
        found = sum(min(limit, middle * factor) for factor in factors) / NUM_QUANTILES
        low, high = (middle, high) if found < mean else (low, middle)
    return tuple(min(float(limit), low * factor) for factor in factors)
