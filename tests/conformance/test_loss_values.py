"""The values of losses that are right are taken for right."""

import numpy as np
import pytest

from rlcore.spi import LossOutput, LossSpec, TokenBatch
from rlcore_conformance.algorithms.loss_values import HeldConstants, LossValue, held, torch_loss, total

BATCH = TokenBatch(
    tokens=np.arange(3, dtype=np.int32),
    offsets=np.asarray([0, 3]),
    loss_mask=np.asarray([False, True, True]),
    token_columns={"weights": np.ones(3, np.float32)},
)
LOGPROBS = {"logprobs": np.asarray([0.0, -1.0, -2.0], np.float32)}


def plain(inputs, config):
    loss = -(inputs.logprobs * inputs.token_columns["weights"]).sum() / inputs.counts.num_loss_tokens
    return LossOutput(loss=loss, sums={"weight": loss.detach()})


def doubles_a_column(inputs, config):
    inputs.token_columns["weights"].mul_(2.0)
    return plain(inputs, config)


def metric_with_a_gradient(inputs, config):
    loss = plain(inputs, config).loss
    return LossOutput(loss=loss, sums={"weight": 2 * loss})


def ratio(inputs, config):
    return LossOutput(loss=plain(inputs, config).loss + (inputs.logprobs - inputs.previous_logprobs).sum())


def evaluated(function):
    pytest.importorskip("torch")
    spec = LossSpec(path=f"{__name__}:{function.__name__}", config=None, token_columns=("weights",))
    return torch_loss(spec, BATCH, BATCH.counts(), LOGPROBS)


def test_a_loss_that_is_right_is_taken_for_right() -> None:
    found = evaluated(plain)
    assert found.value == 1.5
    np.testing.assert_array_equal(found.gradients["logprobs"], [-0.5, -0.5, -0.5])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (doubles_a_column, r"changed token_columns\['weights'\] in place"),
        (metric_with_a_gradient, r"metrics \['weight'\] have a gradient"),
        (ratio, r"previous_logprobs: None, since AlgorithmNeeds"),
    ],
)
def test_a_loss_that_is_wrong_is_told_what_of(function, message) -> None:
    with pytest.raises(AssertionError, match=message):
        evaluated(function)


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
