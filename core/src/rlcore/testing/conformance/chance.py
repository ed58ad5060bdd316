"""How far from its expected value chance may bring what a right sampler does."""

from math import sqrt

import numpy as np

from rlcore.testing.conformance.reference import Float64Array

UNLIKELY = 4.5
"""Standard deviations: a normal number is as far off once in 10⁵."""
UNLIKELY_OF_MANY = 5.5
"""The same for the farthest off of hundreds."""
KOLMOGOROV_SMIRNOV = 2.5
"""Distance to the uniform distribution times √n: as far off once in 10⁵."""


def limit_of(deviations: float, variance: float) -> float:
    """As unlikely for a count as so many standard deviations are for a normal number: many of what is rare are less so. By the
    expansion of Cornish and Fisher (1938) to the skewness, which for a Poisson count is 1/√variance."""
    return deviations + (deviations**2 - 1.0) / (6.0 * sqrt(variance))


def distance_to_uniform(draws: Float64Array) -> float:
    """Kolmogorov and Smirnov's, of numbers float64 [n] in [0, 1), times √n."""
    places = (np.arange(len(draws)) + 0.5) / len(draws)
    return float(np.abs(np.sort(draws) - places).max() * sqrt(len(draws)))
