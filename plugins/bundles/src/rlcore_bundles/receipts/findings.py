"""Compares log-probabilities with those that were computed again, and names the cause of a difference.

With δ = found - independent, a temperature T' in place of T moves a token's log-probability by (T/T' - 1)·s to first order.
Here s = d log p / d log(1/T) = z - E[z] of its scaled logit z. A factor f moves it by (f - 1)·log p. Least squares fit both.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from rlcore.spi.arrays import BoolArray, Float32Array

EXPLAINED = 0.9
"""Least share of the squared differences that a cause explains."""
LEAST, NUM_ERRORS, FEWEST = 0.01, 5.0, 30
"""A temperature or factor is wrong within the bound too, where it is off by this share and so many standard errors, by so many
tokens. Rounding has no direction, so that many tokens show what none shows alone."""
SHOWN = 3
OTHER = {"trainer": "generator", "generator": "trainer"}
Float64Array = NDArray[np.float64]


@frozen(kw_only=True, eq=False)
class Independent:
    """Log-probabilities that were computed again."""

    logprobs: Float64Array
    """float64 [T]; 0.0 where nothing was computed."""
    slopes: Float64Array
    """float64 [T]: d log p / d log(1/temperature)."""
    computed: BoolArray
    """bool [T]"""


@frozen(kw_only=True)
class Difference:
    """The distance of one part's log-probabilities from the independent ones."""

    num_tokens: int
    mean: float
    """Mean of |δ| in nats."""
    greatest: float
    """Greatest |δ| in nats."""
    token: int
    """The index of that token in the batch."""
    temperature: float
    """The temperature that fits best, where the recipe's is 1."""
    factor: float
    """The factor that fits best."""
    cause: str
    """"temperature", "factor" or "weights"; "" where nothing is wrong."""


def difference(found: Float32Array, independent: Independent, mask: BoolArray, bound: float) -> Difference | None:
    """Compare the tokens of `mask` that were computed; None where there is none."""
    where = np.flatnonzero(mask & independent.computed)
    if not len(where):
        return None
    expected, slopes = independent.logprobs[where], independent.slopes[where]
    delta = found[where].astype(np.float64) - expected
    delta = np.where(np.isfinite(delta), delta, np.inf)
    distance = np.abs(delta)
    worst = int(distance.argmax())
    mean = float(distance.mean())
    fits = {"temperature": _fit(delta, slopes), "factor": _fit(delta, expected)}
    likeliest = max(fits, key=lambda name: fits[name].explained)
    cause = ""
    if not mean <= bound:
        cause = likeliest if fits[likeliest].explained >= EXPLAINED else "weights"
    elif len(where) >= FEWEST and fits[likeliest].is_certain:
        cause = likeliest
    return Difference(
        num_tokens=len(where),
        mean=mean,
        greatest=float(distance[worst]),
        token=int(where[worst]),
        temperature=1.0 / max(1.0 + fits["temperature"].coefficient, 1e-3),
        factor=1.0 + fits["factor"].coefficient,
        cause=cause,
    )


@frozen(kw_only=True)
class _Fit:
    """A fit of least squares, δ = coefficient · x."""

    coefficient: float = 0.0
    explained: float = 0.0
    """The share of the squared differences that it explains."""
    error: float = 0.0
    """The standard error of the coefficient."""

    @property
    def is_certain(self) -> bool:
        """Return whether the coefficient is no rounding."""
        return abs(self.coefficient) >= max(LEAST, NUM_ERRORS * self.error)


def _fit(delta: Float64Array, by: Float64Array) -> _Fit:
    """The fit of differences by numbers, [n] each."""
    norm, total = float(by @ by), float(delta @ delta)
    if not np.isfinite(total) or norm <= 0 or total <= 0:
        return _Fit()
    coefficient = float(delta @ by) / norm
    rest = delta - coefficient * by
    left = float(rest @ rest)
    error = math.sqrt(left / max(len(delta) - 1, 1) / norm)
    return _Fit(coefficient=coefficient, explained=1.0 - left / total, error=error)


def finding(
    trainer: Difference | None, generation: Difference | None, tensors: Mapping[str, Any] | None, temperature: float
) -> str:
    """The causes of all differences beyond the bound, in words; "" where there are none. `tensors` names those that a refit
    left out or changed."""
    found = []
    if tensors is not None:
        for name, what in (("missing", "the refit left out"), ("changed", "the refit brought other values of")):
            if names := tensors[name]:
                more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
                found.append(f"{what} {', '.join(names[:SHOWN])}{more}")
    for part, of, other in (("trainer", trainer, generation), ("generator", generation, trainer)):
        if of is None or not of.cause:
            continue
        figures = f"by {of.mean:.3g} in the mean of {of.num_tokens} tokens"
        if of.cause == "temperature":
            found.append(
                f"the {part}'s log-probabilities are those of temperature {of.temperature * temperature:.4g}, {figures}"
            )
        elif of.cause == "factor":
            found.append(f"the {part}'s log-probabilities are {of.factor:.4g} times the independent ones, {figures}")
        else:
            alone = "" if other is None or other.cause else f", and those of the {OTHER[part]} do not"
            found.append(f"the {part}'s log-probabilities differ from the independent ones {figures}{alone}")
    return "; ".join(found)
