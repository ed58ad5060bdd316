"""A small algorithm: rewards against their group's mean, likelihood of demonstrations, or preferences; with its losses.

Losses are functions of numpy arrays that return their value together with its gradients. They have the signature of any loss,
but read numpy arrays from LossInputs, and `LossOutput.loss` is a FakeLoss.
"""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from attrs import evolve, frozen

from rlcore import spi
from rlcore.spi.arrays import Float32Array
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
class NoOptions:
    """The losses fake_likelihood, fake_regression and fake_value_error have no options."""


def fake_likelihood(inputs: spi.LossInputs, config: NoOptions) -> spi.LossOutput:  # noqa: ARG001
    """Mean negative log-likelihood of the masked tokens: -Σ m · logprob / global loss tokens."""
    weights = np.asarray(inputs.loss_mask, np.float64) / max(inputs.counts.num_loss_tokens, 1)
    value = float(-(weights * np.asarray(inputs.logprobs)).sum())
    return _output(FakeLoss(value=value, logprob_grads=-weights), {"loss/negative_log_likelihood": value})


@frozen(kw_only=True)
class FakePreferenceConfig:
    """Constants of fake_preference."""

    reference: bool = False
    """Compare log-probabilities with the reference's."""


def fake_preference(inputs: spi.LossInputs, config: FakePreferenceConfig) -> spi.LossOutput:
    """-log sigmoid(chosen - rejected) of the answers' log-probabilities, less the reference's where it is compared with; the
    mean over the pairs of adjacent sequences that have loss tokens."""
    arrays: Any = inputs
    mask = np.asarray(arrays.loss_mask, np.float64)
    scores = np.asarray(arrays.logprobs, np.float64)
    if config.reference:
        scores = scores - arrays.token_columns[spi.REFERENCE_LOGPROBS]
    lengths, pairs = np.diff(arrays.offsets), arrays.offsets[::2]
    signs = np.repeat(np.resize([1.0, -1.0], len(lengths)), lengths) * mask
    margins = np.add.reduceat(signs * scores, pairs[:-1])
    counted = np.add.reduceat(mask, pairs[:-1]) > 0
    num_pairs = inputs.counts.num_loss_sequences / 2
    pushes = np.repeat(counted / (1.0 + np.exp(margins)), np.diff(pairs))
    value = float((counted * np.log1p(np.exp(-margins))).sum() / num_pairs)
    margin = float((counted * margins).sum() / num_pairs)
    return _output(FakeLoss(value=value, logprob_grads=-pushes * signs / num_pairs), {"margin": margin})


def fake_regression(inputs: spi.LossInputs, config: NoOptions) -> spi.LossOutput:  # noqa: ARG001
    """Mean over the masked tokens of (value - 1)² / 2."""
    weights = np.asarray(inputs.loss_mask, np.float64) / max(inputs.counts.num_loss_tokens, 1)
    errors = np.asarray(inputs.values, np.float64) - 1.0
    value = float((weights * errors**2 / 2).sum())
    loss = FakeLoss(value=value, logprob_grads=np.zeros_like(errors), value_grads=weights * errors)
    return _output(loss, {"loss/squared_error": 2 * value})


TOKEN_REWARDS = "token_rewards"
"""float32 [T], a token column: its sample's reward; 0.0 where loss_mask is False."""


def fake_value_error(inputs: spi.LossInputs, config: NoOptions) -> spi.LossOutput:  # noqa: ARG001
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


def fake_policy_gradient(inputs: spi.LossInputs, config: FakePolicyGradientConfig) -> spi.LossOutput:
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
            raise spi.ContractError("fake_policy_gradient: found no previous_logprobs; expected those that LossSpec declares")
        objective = slope = np.exp(current - np.asarray(inputs.previous_logprobs))
        sums["ratio"] = float((weights * slope).sum())
    elif config.generation_ratio:
        objective = slope = np.exp(current - columns[spi.GENERATION_LOGPROBS])
        sums["generation_ratio"] = float((weights * slope).sum())
    per_token, grads = -columns[spi.ADVANTAGES] * objective, -columns[spi.ADVANTAGES] * slope
    if config.kl_coefficient:
        distance = current - columns[spi.REFERENCE_LOGPROBS]
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


def _output(loss: FakeLoss, sums: dict[str, float]) -> spi.LossOutput:
    # The record names torch tensors; numpy's scalars stand in for them here.
    fields: dict[str, Any] = {"loss": loss, "sums": sums}
    return spi.LossOutput(**fields)


@frozen(kw_only=True)
class FakeAlgorithmConfig:
    """Options of the fake algorithm."""

    source: Literal["rollouts", "demonstrations", "preferences"] = "rollouts"
    """The source of its samples."""
    previous_logprobs: bool = False
    """True where updates use an importance ratio."""
    generation_ratio: bool = False
    """True where updates use the ratio to the probabilities that were sampled with, in place of that one."""
    kl_coefficient: float = 0.0
    """Pull towards the reference policy; above 0.0 its log-probabilities are needed."""
    entropy_coefficient: float = 0.0
    """Entropy bonus."""
    head: spi.Head = "tokens"
    """"value": learn a value of 1 after each token of demonstrations."""
    critic: bool = False
    """Train a critic on the rewards, and compare each token's with what it told in place of the group's mean."""


class FakeAlgorithm:
    """The algorithm backend `fake`."""

    def __init__(self, context: spi.AlgorithmContext, config: FakeAlgorithmConfig) -> None:  # noqa: ARG002
        self.config = config

    @property
    def needs(self) -> spi.AlgorithmNeeds:
        """Return the inputs that the loop must provide."""
        return spi.AlgorithmNeeds(
            source=self.config.source,
            previous_logprobs=self.config.previous_logprobs,
            reference_logprobs=self.config.kl_coefficient > 0.0,
            entropy=self.config.source == "rollouts",
            min_samples_per_prompt=2 if self.config.source == "rollouts" else 1,
            untruncated_sampling=self.config.previous_logprobs or self.config.generation_ratio,
            corrects_staleness=self.config.generation_ratio,
            whole_groups=self.config.source == "preferences",
            head=self.config.head,
            critic=self.config.critic,
        )

    def build_batch(self, rollouts: spi.RolloutBatch) -> spi.TrainingBatch:
        """Advantages are rewards less the mean over the group's valid samples."""
        batch, kind = rollouts.batch, "value" if self.config.head == "value" else self.config.source
        of_kind = {
            "value": ("fake_regression", NoOptions()),
            "demonstrations": ("fake_likelihood", NoOptions()),
            "preferences": ("fake_preference", FakePreferenceConfig(reference=self.config.kl_coefficient > 0.0)),
        }
        if kind in of_kind:
            return spi.TrainingBatch(batch=batch, loss=_loss_spec(*of_kind[kind]))
        if self.config.critic:
            return self.build_with_critic(rollouts)
        advantages = group_advantages(rollouts)
        per_token = np.repeat(advantages.astype(np.float32), batch.lengths) * batch.loss_mask
        return spi.TrainingBatch(
            batch=batch.with_token_column(spi.ADVANTAGES, per_token),
            loss=self.loss(),
            metrics={"advantage/max": float(np.abs(advantages).max(initial=0.0))},
            no_signal=None if advantages.any() else "the rewards of every group are equal",
            has_signal=None if self.config.kl_coefficient or self.config.entropy_coefficient else advantages != 0,
        )

    def measure_values(self, examples: spi.RolloutBatch, values: Float32Array) -> Mapping[str, float]:
        """The mean of the values after the loss tokens."""
        return {"value_mean": float(values[examples.batch.loss_mask].mean())}

    def build_with_critic(self, rollouts: spi.RolloutBatch) -> spi.TrainingBatch:
        """A token's advantage is its sample's reward less the value before it."""
        batch = rollouts.batch
        rewards = np.where(batch.loss_mask, np.repeat(rollouts.rewards, batch.lengths), 0).astype(np.float32)
        before = np.where(batch.loss_mask, np.roll(batch.token_columns[spi.VALUES], 1), 0).astype(np.float32)
        batch = batch.with_token_column(spi.ADVANTAGES, rewards - before).with_token_column(TOKEN_REWARDS, rewards)
        critic_loss = _loss_spec("fake_value_error", NoOptions(), TOKEN_REWARDS)
        return spi.TrainingBatch(batch=batch, loss=self.loss(), critic_loss=critic_loss)

    def loss(self) -> spi.LossSpec:
        """The policy gradient, with the columns and the entropy that its coefficients ask for."""
        reference = (spi.REFERENCE_LOGPROBS,) if self.config.kl_coefficient > 0.0 else ()
        generation = (spi.GENERATION_LOGPROBS,) if self.config.generation_ratio else ()
        config = FakePolicyGradientConfig(
            importance_ratio=self.config.previous_logprobs,
            generation_ratio=self.config.generation_ratio,
            entropy_coefficient=self.config.entropy_coefficient,
            kl_coefficient=self.config.kl_coefficient,
        )
        spec = _loss_spec("fake_policy_gradient", config, spi.ADVANTAGES, *generation, *reference)
        return evolve(spec, entropy="loss" if self.config.entropy_coefficient > 0.0 else "metric")


def _loss_spec(name: str, config: object, *columns: str) -> spi.LossSpec:
    return spi.LossSpec(path=f"{__name__}:{name}", config=config, token_columns=columns)


def group_advantages(rollouts: spi.RolloutBatch) -> Float64Array:
    """float64 [N]: reward less the mean of the group's valid samples; 0.0 where not valid."""
    valid = rollouts.valid.astype(np.float64)
    totals = np.bincount(rollouts.group_ids, rollouts.rewards * valid)
    means = totals / np.maximum(np.bincount(rollouts.group_ids, valid), 1.0)
    return np.asarray((rollouts.rewards - means[rollouts.group_ids]) * valid)
