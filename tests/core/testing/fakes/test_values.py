"""The fakes' values: gradients against differences, and where their head begins."""

import numpy as np
import pytest

from rlcore.spi.weights import VALUE_HEAD_WEIGHT
from rlcore.testing.fakes.policy import VALUES_PATH, ValueForward, make_value_weights

TOKENS, OFFSETS = np.array([1, 4, 4, 2, 0, 3], np.int32), np.array([0, 1, 4, 6], np.int64)


def test_gradients_are_those_of_the_values():
    weights = make_value_weights(5, 0, 0.7, VALUES_PATH)
    upstream = np.linspace(-1.0, 2.0, len(TOKENS))
    found = ValueForward.of(weights, TOKENS, OFFSETS).gradients(weights, upstream)
    moved = {name: np.random.default_rng(1).standard_normal(value.shape) for name, value in weights.items()}

    def total(step):
        shifted = {name: value.astype(np.float64) + step * moved[name] for name, value in weights.items()}
        return float(ValueForward.of(shifted, TOKENS, OFFSETS).values() @ upstream)

    expected = (total(1e-5) - total(-1e-5)) / 2e-5
    assert sum(float((found[name] * moved[name]).sum()) for name in weights) == pytest.approx(expected, rel=1e-8)


def test_a_head_begins_at_zero_but_where_the_model_holds_one():
    assert not make_value_weights(5, 0, 0.7, "fake")[VALUE_HEAD_WEIGHT].any()
    assert make_value_weights(5, 0, 0.7, VALUES_PATH)[VALUE_HEAD_WEIGHT].any()
