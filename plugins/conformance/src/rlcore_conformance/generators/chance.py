"""Statistical tests of a sampler, and the limits that a right sampler exceeds only by rare chance."""

from collections.abc import Callable, Mapping
from math import sqrt
from typing import Literal

import numpy as np
from attrs import define, frozen

from rlcore_conformance.references.reference import Float64Array


@frozen(kw_only=True)
class Limits:
    """Distances from the expected value beyond which a figure counts as wrong."""

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
"""Number of further questions whose samples decide about a suspicion."""
FEWEST = 32.0
"""Variance below which a count is too far from normal to be judged."""
FOUND = 6.0
"""Standard deviations from 0 at which an effect is found: by chance once in 10⁹ looks."""
EXCLUDED = 3.3
"""Standard deviations from an effect at which it is excluded: wrongly once in 2,000 looks."""


@define
class Score:
    """The score of a tilt θ of the distribution, p(x) · exp(θ · feature(x)), at θ = 0, over many tokens (Rao, 1948)."""

    difference: float = 0.0
    """The feature of the tokens, less its expectation, added up."""
    variance: float = 0.0
    """The variances of the feature, added up: Fisher's information about θ."""

    def add(self, found: Float64Array, expected: Float64Array, variance: Float64Array) -> None:
        """Add tokens: the feature of each, its expectation and its variance, [L]."""
        self.difference += float((found - expected).sum())
        self.variance += float(variance.sum())

    def join(self, other: "Score") -> None:
        """Add the tokens of another score."""
        self.difference += other.difference
        self.variance += other.variance

    @property
    def deviations(self) -> float:
        """The difference in standard deviations."""
        return self.difference / max(sqrt(self.variance), 1e-9)

    @property
    def effect(self) -> float:
        """The estimate of θ, to first order."""
        return self.difference / max(self.variance, 1e-9)

    def is_beyond(self, deviations: float) -> bool:
        """Return whether the difference exceeds so many standard deviations. False below a variance of FEWEST."""
        return self.variance >= FEWEST and abs(self.deviations) > limit_of(deviations, self.variance)

    def verdict(self, effect: float) -> Literal["found", "excluded", "open"]:
        """Return "found" where θ is not 0, "excluded" where |θ| is below `effect`, "open" where it takes more tokens to tell.

        A sequential test by confidence intervals. At a true θ of `effect` it ends with "excluded" less than once in 100 times.
        """
        if self.is_beyond(FOUND):
            return "found"
        distance = effect * sqrt(self.variance) - abs(self.deviations)
        return "excluded" if self.variance >= FEWEST and distance > EXCLUDED else "open"


def limit_of(deviations: float, variance: float) -> float:
    """The distance, in standard deviations, that is as unlikely for a count as `deviations` are for a normal number. By the
    expansion of Cornish and Fisher (1938) to the skewness, which for a Poisson count is 1/√variance."""
    return deviations + (deviations**2 - 1.0) / (6.0 * sqrt(variance))


def distance_to_uniform(draws: Float64Array) -> float:
    """The distance of Kolmogorov and Smirnov of numbers float64 [n] in [0, 1), times √n."""
    places = (np.arange(len(draws)) + 0.5) / len(draws)
    return float(np.abs(np.sort(draws) - places).max() * sqrt(len(draws)))


def recurring(find: Callable[[range, Limits], Mapping[str, str]]) -> list[str]:
    """Return the faults of a sampler that recur: `find` reports them for the first question, and again with NUM_AGAIN others.

    `find` gets numbers of questions and limits, and returns faults by name. A right sampler has a given one once in 10¹⁰ times.
    """
    suspicions = find(range(1), SUSPICIOUS)
    found = find(range(1, 1 + NUM_AGAIN), CERTAIN) if suspicions else {}
    return [problem for name, problem in found.items() if name in suspicions]
