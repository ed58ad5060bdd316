"""The outcome of an update, and comparisons of two."""

from collections.abc import Mapping
from math import sqrt

import numpy as np
from attrs import frozen

from rlcore.spi import TrainStepResult
from rlcore_conformance.references.tensors import Values

ROUNDING = 1e-5
"""Relative difference of a float32 norm of all gradients from the float64 norms of tensors."""


@frozen(kw_only=True, eq=False)
class StepOutcome:
    """One update, and the weights after it."""

    result: TrainStepResult
    weights: Values
    tolerance: float
    """Most that a log-probability of this trainer may be off, in nats."""


def assert_same_step(found: StepOutcome, expected: StepOutcome, before: Values, whose: str = "") -> None:
    """The two updates are one but for rounding; `whose` begins each message.

    Weights are compared by the norm of the whole update: Adam divides each gradient by its own size, so that where it is
    nothing but rounding, single elements may differ.
    """
    one, other, rounding = found.result, expected.result, expected.tolerance / 10
    assert_close(f"{whose}loss", one.loss, other.loss, rounding)
    assert_close(f"{whose}grad_norm", one.grad_norm, other.grad_norm, expected.tolerance)
    assert one.learning_rate == other.learning_rate, (
        f"{whose}learning_rate: found {one.learning_rate}; expected {other.learning_rate}"
    )
    assert_same_names(f"{whose}metrics", one.metrics, other.metrics)
    for name, value in other.metrics.items():
        assert_close(whose + name, one.metrics[name], value, rounding)
    difference, update = distance(found.weights, expected.weights), distance(expected.weights, before)
    share = max(0.02, expected.tolerance / 3)
    assert difference <= share * update, (
        f"{whose}the updated weights differ by {difference:.3g}; expected at most {share:.2g} of the update's own {update:.3g}"
    )


def assert_same_weights(found: Values, expected: Values) -> None:
    """Every tensor of `expected` is in `found`, to the bit."""
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def assert_same_names(what: str, found: Mapping[str, object], expected: Mapping[str, object]) -> None:
    """Assert that two mappings of metrics or tensors have the same names."""
    assert found.keys() == expected.keys(), f"{what}: found {sorted(found)}; expected {sorted(expected)}"


def assert_norms_add_up(result: TrainStepResult) -> None:
    """Assert that a step's norms of tensors make up the norm of the whole gradient."""
    assert result.gradient_norms is not None, "gradient_norms: found none; expected them, since they were asked for"
    root = sqrt(sum(norm**2 for norm in result.gradient_norms.values()))
    assert abs(root - result.grad_norm) <= ROUNDING * result.grad_norm, (
        f"gradient_norms: the root of the sum of squares is {root}; expected grad_norm, {result.grad_norm}"
    )


def assert_close(name: str, found: float, expected: float, relative: float) -> None:
    """Equal within `relative`, or as much in absolute terms below 1."""
    allowed = relative * max(abs(expected), 1.0)
    assert abs(found - expected) <= allowed, f"{name}: found {found}; expected {expected} within {allowed:.3g}"


def distance(one: Values, other: Values) -> float:
    """L2 norm of the difference of all weights."""
    assert one.keys() == other.keys()
    return float(np.sqrt(sum(((one[name].astype(np.float64) - other[name]) ** 2).sum() for name in one)))
