"""The losses of the fakes: derivatives, and the ratio to previous log-probabilities."""

import numpy as np
import pytest
from attrs import evolve

from rlcore.spi import (
    ADVANTAGES,
    GENERATION_LOGPROBS,
    PREVIOUS_LOGPROBS,
    REFERENCE_LOGPROBS,
    ContractError,
    GlobalCounts,
    LossInputs,
)
from rlcore.testing.fakes.algorithm import FakePolicyGradientConfig, NoOptions, fake_likelihood, fake_policy_gradient

COUNTS = GlobalCounts(num_loss_tokens=7, num_loss_sequences=3)


def loss_inputs(seed, columns):
    random = np.random.default_rng(seed)
    mask = np.array([False, True, True, False, True, False, True])
    return LossInputs(
        logprobs=-random.random(7),
        entropy=random.random(7),
        loss_mask=mask,
        offsets=np.array([0, 3, 7]),
        token_columns={name: random.standard_normal(7).astype(np.float32) for name in columns if name != PREVIOUS_LOGPROBS},
        sequence_columns={},
        counts=COUNTS,
        previous_logprobs=random.standard_normal(7).astype(np.float32) if PREVIOUS_LOGPROBS in columns else None,
    )


@pytest.mark.parametrize(
    ("loss", "config", "columns"),
    [
        (fake_likelihood, NoOptions(), ()),
        (fake_policy_gradient, FakePolicyGradientConfig(), (ADVANTAGES,)),
        (
            fake_policy_gradient,
            FakePolicyGradientConfig(importance_ratio=True, entropy_coefficient=0.3, kl_coefficient=0.2),
            (ADVANTAGES, GENERATION_LOGPROBS, PREVIOUS_LOGPROBS, REFERENCE_LOGPROBS),
        ),
    ],
)
def test_the_derivatives_of_the_losses_are_those_of_their_values(loss, config, columns):
    inputs = loss_inputs(0, columns)
    output = loss(inputs, config).loss
    for field, grads in (("logprobs", output.logprob_grads), ("entropy", output.entropy_grads)):
        for index in range(7):
            values = []
            for step in (1e-6, -1e-6):
                moved = getattr(inputs, field).copy()
                moved[index] += step
                values.append(loss(evolve(inputs, **{field: moved}), config).loss.value)
            expected = (values[0] - values[1]) / 2e-6
            assert (0.0 if grads is None else grads[index]) == pytest.approx(expected, abs=1e-6)


def test_a_ratio_to_unchanged_weights_is_one():
    inputs = loss_inputs(1, (ADVANTAGES,))
    plain = fake_policy_gradient(inputs, FakePolicyGradientConfig()).loss.logprob_grads
    np.testing.assert_allclose(plain, inputs.loss_mask * -inputs.token_columns[ADVANTAGES] / 7)
    unchanged = evolve(inputs, previous_logprobs=inputs.logprobs)
    output = fake_policy_gradient(unchanged, FakePolicyGradientConfig(importance_ratio=True))
    np.testing.assert_allclose(output.loss.logprob_grads, plain)
    assert output.sums["ratio"] == pytest.approx(inputs.loss_mask.sum() / 7)


def test_a_ratio_to_log_probabilities_that_nobody_knows_is_refused():
    with pytest.raises(ContractError, match="previous_logprobs"):
        fake_policy_gradient(loss_inputs(1, (ADVANTAGES,)), FakePolicyGradientConfig(importance_ratio=True))
