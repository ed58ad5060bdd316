"""How far from its expected value chance may bring what a right sampler does."""

from collections.abc import Callable, Mapping
from math import sqrt

import numpy as np
from attrs import frozen

from rlcore.testing.conformance.reference import Float64Array


@frozen(kw_only=True)
class Limits:
    """How far off a figure has to be to count as wrong."""

    deviations: float
    """The distance of a normal number from its mean, in standard deviations."""
    deviations_of_many: float
    """The largest such distance among hundreds of normal numbers."""
    kolmogorov_smirnov: float
    """Distance of n numbers to the uniform distribution times √n."""


SUSPICIOUS = Limits(deviations=3.5, deviations_of_many=4.5, kolmogorov_smirnov=2.0)
"""A right sampler exceeds a limit once in 10³ times, that of many numbers once in 10⁵; then more samples are drawn."""
CERTAIN = Limits(deviations=5.5, deviations_of_many=5.5, kolmogorov_smirnov=2.9)
"""A right sampler exceeds a limit once in 10⁷ times."""
NUM_AGAIN = 4
"""How many times as many samples decide about a suspicion."""


def limit_of(deviations: float, variance: float) -> float:
    """The distance, in standard deviations, that is as unlikely for a count as `deviations` are for a normal number. By the
    expansion of Cornish and Fisher (1938) to the skewness, which for a Poisson count is 1/√variance."""
    return deviations + (deviations**2 - 1.0) / (6.0 * sqrt(variance))


def distance_to_uniform(draws: Float64Array) -> float:
    """The distance of Kolmogorov and Smirnov of numbers float64 [n] in [0, 1), times √n."""
    places = (np.arange(len(draws)) + 0.5) / len(draws)
    return float(np.abs(np.sort(draws) - places).max() * sqrt(len(draws)))


def recurring(find: Callable[[range, Limits], Mapping[str, str]]) -> list[str]:
    """What is wrong with a sampler: what `find`, which is given numbers of questions and limits, says by name of the first
    question's samples, and again of those of NUM_AGAIN others. Of any one figure of a right sampler, once in 10¹⁰."""
    suspicions = find(range(1), SUSPICIOUS)
    found = find(range(1, 1 + NUM_AGAIN), CERTAIN) if suspicions else {}
    return [problem for name, problem in found.items() if name in suspicions]
