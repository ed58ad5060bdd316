"""How far from its expected value chance may bring what a right sampler does."""

from collections.abc import Callable, Mapping
from math import sqrt

import numpy as np
from attrs import frozen

from rlcore.testing.conformance.reference import Float64Array


@frozen(kw_only=True)
class Limits:
    """How far off a figure has to be. A right sampler is beyond them by chance as often as said."""

    deviations: float
    """Standard deviations of a normal number."""
    deviations_of_many: float
    """The same for the farthest off of hundreds."""
    kolmogorov_smirnov: float
    """Distance to the uniform distribution times √n."""


SUSPICIOUS = Limits(deviations=3.5, deviations_of_many=4.5, kolmogorov_smirnov=2.0)
"""Once in 10³, of many once in 10⁵: then more samples are drawn."""
CERTAIN = Limits(deviations=5.5, deviations_of_many=5.5, kolmogorov_smirnov=2.9)
"""Once in 10⁷."""
NUM_AGAIN = 4
"""How many times as many samples decide about a suspicion."""


def limit_of(deviations: float, variance: float) -> float:
    """As unlikely for a count as so many standard deviations are for a normal number: many of what is rare are less so. By the
    expansion of Cornish and Fisher (1938) to the skewness, which for a Poisson count is 1/√variance."""
    return deviations + (deviations**2 - 1.0) / (6.0 * sqrt(variance))


def distance_to_uniform(draws: Float64Array) -> float:
    """Kolmogorov and Smirnov's, of numbers float64 [n] in [0, 1), times √n."""
    places = (np.arange(len(draws)) + 0.5) / len(draws)
    return float(np.abs(np.sort(draws) - places).max() * sqrt(len(draws)))


def recurring(find: Callable[[range, Limits], Mapping[str, str]]) -> list[str]:
    """What is wrong with a sampler: what `find`, which is given numbers of questions and limits, says by name of the first
    question's samples, and again of those of NUM_AGAIN others. Of any one figure of a right sampler, once in 10¹⁰."""
    suspicions = find(range(1), SUSPICIOUS)
    found = find(range(1, 1 + NUM_AGAIN), CERTAIN) if suspicions else {}
    return [problem for name, problem in found.items() if name in suspicions]
