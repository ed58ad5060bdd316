"""Checks on the values that backends return; each raises an error that names the value."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from rlcore.spi.arrays import AnyArray, Float32Array, Int64Array, check_array
from rlcore.spi.batch import TokenBatch
from rlcore.spi.errors import ContractError, NonFiniteError
from rlcore.spi.loss import MISMATCH_METRICS

TOLERANCE = 1e-4
"""How far above 0 a log-probability, or below 0 an entropy, may be by rounding."""

OWN_METRICS = frozenset(
    {
        "step",
        "reward_mean",
        "reward_std",
        "success_rate",
        "response_length_mean",
        "response_length_max",
        "truncated_fraction",
        "loss",
        "grad_norm",
        "learning_rate",
        "weight_version",
        "updates",
        "tokens_per_second",
        "generated_tokens_per_second",
        "mean_generated_tokens",
        *MISMATCH_METRICS,
    }
)
"""Names in metrics.jsonl that no plugin's metric may have."""
OWN_PREFIXES = ("time/", "memory/", "environment/", "evaluation/")

RecordT = TypeVar("RecordT")


def check_record(value: object, expected: type[RecordT]) -> RecordT:
    """`value`, which must be a record of exactly this class; None never is."""
    if not isinstance(value, expected):
        raise ContractError(f"found {_described(value)}; expected {_article(expected.__name__)}")
    return value


def check_int(name: str, value: object, *, at_least: int) -> int:
    """A Python int, booleans excluded."""
    if type(value) is not int:
        raise ContractError(f"{name}: found {_described(value)}; expected an int")
    if value < at_least:
        raise ContractError(f"{name}: found {value}; expected at least {at_least}")
    return value


def check_figure(name: str, value: object) -> float:
    """A finite Python number, booleans excluded; a tensor or array is none."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ContractError(f"{name}: found {_described(value)}; expected a float")
    if not math.isfinite(value):
        raise NonFiniteError(f"{name}: found {value}; expected a finite number")
    return float(value)


def check_figures(name: str, values: object) -> None:
    """A mapping from names to finite numbers."""
    if not isinstance(values, Mapping):
        raise ContractError(f"{name}: found {_described(values)}; expected a mapping")
    for key, value in values.items():
        if not isinstance(key, str):
            raise ContractError(f"{name}: found the key {key!r}; expected a string")
        check_figure(f"{name}[{key!r}]", value)


def check_own_names(name: str, values: Iterable[str]) -> None:
    """No metric of a plugin takes the place of one that the loop writes itself."""
    for key in values:
        if key in OWN_METRICS or key.startswith(OWN_PREFIXES):
            raise ContractError(f"{name}: found {key!r}, which the loop writes itself; expected another name")


def check_range(name: str, values: AnyArray, *, lower: float = -math.inf, upper: float = math.inf) -> None:
    """Finite, and within the bounds. Two reductions, which carry a NaN along."""
    if not len(values):
        return
    low, high = values.min(), values.max()
    if not (math.isfinite(low) and math.isfinite(high)):
        worst = int(np.argmin(np.isfinite(values)))
        raise NonFiniteError(f"{name}: found {values[worst]} at token {worst}; expected finite numbers")
    if low < lower or high > upper:
        worst = int(values.argmin() if low < lower else values.argmax())
        bound = f"at least {lower}" if low < lower else f"at most {upper}"
        raise ContractError(f"{name}: found {values[worst]} at token {worst}; expected {bound}")


def check_token_arrays(
    name: str,
    arrays: object,
    microbatches: Sequence[TokenBatch],
    *,
    lower: float = -math.inf,
    upper: float = math.inf,
) -> tuple[Float32Array, ...]:
    """One float32 [T] a microbatch, finite, within the bounds, 0.0 at the first token of each sequence."""
    if not isinstance(arrays, tuple):
        raise ContractError(f"{name}: found {_described(arrays)}; expected a tuple of arrays")
    if len(arrays) != len(microbatches):
        raise ContractError(f"{name}: found {len(arrays)} arrays; expected one for each of {len(microbatches)} microbatches")
    for index, (array, microbatch) in enumerate(zip(arrays, microbatches, strict=True)):
        where = f"{name} of microbatch {index}"
        check_array(where, array, np.float32, microbatch.num_tokens)
        check_range(where, array, lower=lower, upper=upper)
        _check_first_tokens(where, array, microbatch.offsets)
    return arrays


def _check_first_tokens(where: str, array: Float32Array, offsets: Int64Array) -> None:
    firsts = array[offsets[:-1]]
    if firsts.any():
        worst = int(firsts.astype(bool).argmax())
        found = firsts[worst]
        raise ContractError(f"{where}: found {found} at the first token of sequence {worst}, which has none; expected 0.0")


def _described(value: object) -> str:
    return "None" if value is None else _article(type(value).__name__)


def _article(name: str) -> str:
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"
