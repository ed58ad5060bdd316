"""Losses for the fake trainer: functions of numpy arrays that return their value together with its gradients.

They have the signature of any loss, but read numpy arrays from LossInputs, and `LossOutput.loss` is a FakeLoss.
"""

from typing import Any

import numpy as np
from attrs import frozen

from rlcore.spi import ADVANTAGES, GENERATION_LOGPROBS, REFERENCE_LOGPROBS, ContractError, LossInputs, LossOutput
from rlcore.testing.fakes.policy import Float64Array


@frozen(kw_only=True, eq=False)
class FakeLoss:
    """A loss and its derivatives, in place of a differentiable scalar."""

    value: float
    logprob_grads: Float64Array
    """float64 [T]: d value / d logprobs."""
    entropy_grads: Float64Array | None = None
    """float64 [T]: d value / d entropy; None where the loss does not depend on it."""
    value_grads: Float64Array | None = None
    """float64 [T]: d value / d values; None where the loss does not depend on them."""


@frozen(kw_only=True)
class FakeLikelihoodConfig:
    """The loss fake_likelihood has no options."""


def fake_likelihood(inputs: LossInputs, config: FakeLikelihoodConfig) -> LossOutput:  # noqa: ARG001
    """Mean negative log-likelihood of the masked tokens: -Σ m · logprob / global loss tokens."""
    weights = np.asarray(inputs.loss_mask, np.float64) / max(inputs.counts.num_loss_tokens, 1)
    value = float(-(weights * np.asarray(inputs.logprobs)).sum())
    return _output(FakeLoss(value=value, logprob_grads=-weights), {"loss/negative_log_likelihood": value})


@frozen(kw_only=True)
class FakePreferenceConfig:
    """Constants of fake_preference."""

    reference: bool = False
    """Compare log-probabilities with the reference's."""


def fake_preference(inputs: LossInputs, config: FakePreferenceConfig) -> LossOutput:
    """-log sigmoid(chosen - rejected) of the answers' log-probabilities, less the reference's where it is compared with; the
    mean over the pairs of adjacent sequences that have loss tokens."""
    arrays: Any = inputs
    mask = np.asarray(arrays.loss_mask, np.float64)
    scores = np.asarray(arrays.logprobs, np.float64)
    if config.reference:
        scores = scores - arrays.token_columns[REFERENCE_LOGPROBS]
    lengths, pairs = np.diff(arrays.offsets), arrays.offsets[::2]
    signs = np.repeat(np.resize([1.0, -1.0], len(lengths)), lengths) * mask
    margins = np.add.reduceat(signs * scores, pairs[:-1])
    counted = np.add.reduceat(mask, pairs[:-1]) > 0
    num_pairs = inputs.counts.num_loss_sequences / 2
    pushes = np.repeat(counted / (1.0 + np.exp(margins)), np.diff(pairs))
    value = float((counted * np.log1p(np.exp(-margins))).sum() / num_pairs)
    margin = float((counted * margins).sum() / num_pairs)
    return _output(FakeLoss(value=value, logprob_grads=-pushes * signs / num_pairs), {"margin": margin})


@frozen(kw_only=True)
class FakeRegressionConfig:
    """The loss fake_regression has no options."""


def fake_regression(inputs: LossInputs, config: FakeRegressionConfig) -> LossOutput:  # noqa: ARG001
    """Mean over the masked tokens of (value - 1)² / 2."""
    weights = np.asarray(inputs.loss_mask, np.float64) / max(inputs.counts.num_loss_tokens, 1)
    errors = np.asarray(inputs.values, np.float64) - 1.0
    value = float((weights * errors**2 / 2).sum())
    loss = FakeLoss(value=value, logprob_grads=np.zeros_like(errors), value_grads=weights * errors)
    return _output(loss, {"loss/squared_error": 2 * value})


TOKEN_REWARDS = "token_rewards"
"""float32 [T], a token column: its sample's reward; 0.0 where loss_mask is False."""


def fake_value_error(inputs: LossInputs, config: FakeRegressionConfig) -> LossOutput:  # noqa: ARG001
    """Mean over the masked tokens of (value before the token - its reward)² / 2."""
    weights = np.asarray(inputs.loss_mask, np.float64) / max(inputs.counts.num_loss_tokens, 1)
    columns: dict[str, Any] = dict(inputs.token_columns)
    errors = weights * (np.roll(np.asarray(inputs.values, np.float64), 1) - columns[TOKEN_REWARDS])
    value = float((errors**2)[weights > 0].sum() / weights.max() / 2) if weights.any() else 0.0
    loss = FakeLoss(value=value, logprob_grads=np.zeros_like(errors), value_grads=np.roll(errors, -1))
    return _output(loss, {"squared_error": 2 * value})


@frozen(kw_only=True)
class FakePolicyGradientConfig:
    """Constants of fake_policy_gradient."""

    importance_ratio: bool = False
    """Weigh tokens by how much more probable they are than at the start of the step."""
    generation_ratio: bool = False
    """Weigh tokens by how much more probable they are than when they were sampled."""
    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus."""
    kl_coefficient: float = 0.0
    """Weight of the squared distance to the reference's log-probabilities."""


def fake_policy_gradient(inputs: LossInputs, config: FakePolicyGradientConfig) -> LossOutput:
    """Policy gradient, divided by the global loss tokens: Σ m · (-A · objective + kl_coefficient · (current - reference)² / 2 -
    entropy_coefficient · entropy), where the objective is `current`, or exp(current - previous) with an importance ratio, or
    exp(current - generation) with the generator's; ContractError where the inputs lack `previous_logprobs` that are read.
    """
    weights = np.asarray(inputs.loss_mask, np.float64) / max(inputs.counts.num_loss_tokens, 1)
    current = np.asarray(inputs.logprobs, np.float64)
    columns: dict[str, Any] = dict(inputs.token_columns)
    sums, objective, slope = {}, current, np.ones_like(current)
    if config.importance_ratio:
        if inputs.previous_logprobs is None:
            raise ContractError("fake_policy_gradient: found no previous_logprobs; expected those that LossSpec declares")
        objective = slope = np.exp(current - np.asarray(inputs.previous_logprobs))
        sums["ratio"] = float((weights * slope).sum())
    elif config.generation_ratio:
        objective = slope = np.exp(current - columns[GENERATION_LOGPROBS])
        sums["generation_ratio"] = float((weights * slope).sum())
    per_token, grads = -columns[ADVANTAGES] * objective, -columns[ADVANTAGES] * slope
    if config.kl_coefficient:
        distance = current - columns[REFERENCE_LOGPROBS]
        per_token = per_token + config.kl_coefficient * distance**2 / 2
        grads = grads + config.kl_coefficient * distance
    entropy_grads = None
    if config.entropy_coefficient:
        per_token = per_token - config.entropy_coefficient * np.asarray(inputs.entropy)
        entropy_grads = -config.entropy_coefficient * weights
    if inputs.entropy is not None:
        sums["entropy"] = float((weights * np.asarray(inputs.entropy)).sum())
    loss = FakeLoss(value=float((weights * per_token).sum()), logprob_grads=weights * grads, entropy_grads=entropy_grads)
    return _output(loss, sums)


def _output(loss: FakeLoss, sums: dict[str, float]) -> LossOutput:
    # The record names torch tensors; numpy's scalars stand in for them here.
    fields: dict[str, Any] = {"loss": loss, "sums": sums}
    return LossOutput(**fields)
