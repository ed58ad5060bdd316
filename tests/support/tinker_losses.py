"""The losses of the tinker protocol in float64, written apart from the project's: terms and derivatives."""

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

Columns = Mapping[str, Any]
Formula = Callable[[Any, Columns], tuple[Any, Any]]


def _clip(ratio: Any, columns: Columns) -> Any:
    return np.clip(ratio, columns["clip_low_threshold"], columns["clip_high_threshold"])


def cross_entropy(p: Any, columns: Columns) -> tuple[Any, Any]:
    """Terms [T] of the loss, and their derivatives by the log-probabilities."""
    return -p, -np.ones_like(p)


def importance_sampling(p: Any, columns: Columns) -> tuple[Any, Any]:
    terms = -np.exp(p - columns["generation_logprobs"]) * columns["advantages"]
    return terms, terms


def _ppo(ratio: Any, columns: Columns) -> tuple[Any, Any]:
    advantages = columns["advantages"]
    plain, clipped = ratio * advantages, _clip(ratio, columns) * advantages
    # The ratio moves the loss where the plain term is the lesser, or both are one.
    return -np.minimum(plain, clipped), np.where(plain <= clipped, -plain, 0.0)


def ppo(p: Any, columns: Columns) -> tuple[Any, Any]:
    return _ppo(np.exp(p - columns["generation_logprobs"]), columns)


def cispo(p: Any, columns: Columns) -> tuple[Any, Any]:
    factor = -_clip(np.exp(p - columns["generation_logprobs"]), columns) * columns["advantages"]
    return factor * p, factor


def dro(p: Any, columns: Columns) -> tuple[Any, Any]:
    difference = p - columns["generation_logprobs"]
    return -(p * columns["advantages"] - 0.5 * 0.05 * difference**2), -(columns["advantages"] - 0.05 * difference)


def gspo(p: Any, columns: Columns) -> tuple[Any, Any]:
    ratio = np.empty_like(p)
    for start, end in pairwise(columns["offsets"]):
        rows = slice(start, end)
        chosen = columns["sequence_ratio_mask"][rows] != 0
        ratio[rows] = np.exp((p - columns["generation_logprobs"])[rows][chosen].mean())
    return _ppo(ratio, columns)  # the derivative by the token's own log-probability is the sequence's ratio


FORMULAS: Mapping[str, Formula] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "dro": dro,
    "gspo": gspo,
}
