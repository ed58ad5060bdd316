"""The values of losses that are right are taken for right."""

import numpy as np
import pytest

from rlcore.testing.conformance.loss_values import HeldConstants, LossValue, held, total


def test_a_sample_that_stands_in_the_batch_twice_counts_twice() -> None:
    part = LossValue(value=1.0, gradients={"logprobs": np.array([1.0, 2.0, 4.0])}, sums={}, maxima={})
    found = total([part], [np.array([0, 1, 1])], 3)
    np.testing.assert_array_equal(found.gradients["logprobs"], [1.0, 6.0, 0.0])


def test_what_is_held_constant_may_be_changed_in_place() -> None:
    torch = pytest.importorskip("torch")
    constants = HeldConstants()
    for given in (1.0, 2.0, 3.0):
        with held(constants):
            found = torch.tensor(given).detach().exp_()
        assert float(found) == pytest.approx(np.exp(1.0))
