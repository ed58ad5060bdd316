"""A small algorithm: rewards against their group's mean, likelihood of demonstrations, or preferences."""

from collections.abc import Mapping
from typing import Literal

import numpy as np
from attrs import frozen

from rlcore.spi import (
    ADVANTAGES,
    GENERATION_LOGPROBS,
    REFERENCE_LOGPROBS,
    VALUES,
    AlgorithmContext,
    AlgorithmNeeds,
    Head,
    LossSpec,
    RolloutBatch,
    TrainingBatch,
)
from rlcore.spi.arrays import Float32Array
from rlcore.testing.fakes.loss import (
    TOKEN_REWARDS,
    FakeLikelihoodConfig,
    FakePolicyGradientConfig,
    FakePreferenceConfig,
    FakeRegressionConfig,
)
from rlcore.testing.fakes.policy import Float64Array


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
    head: Head = "tokens"
    """"value": learn a value of 1 after each token of demonstrations."""
    critic: bool = False
    """Train a critic on the rewards, and compare each token's with what it told in place of the group's mean."""


class FakeAlgorithm:
    """The algorithm backend `fake`."""

    def __init__(self, context: AlgorithmContext, config: FakeAlgorithmConfig) -> None:  # noqa: ARG002
        self.config = config

    @property
    def needs(self) -> AlgorithmNeeds:
        """Return the inputs that the loop must provide."""
        return AlgorithmNeeds(
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

    def build_batch(self, rollouts: RolloutBatch) -> TrainingBatch:
        """Advantages are rewards less the mean over the group's valid samples."""
        batch = rollouts.batch
        if self.config.head == "value":
            values = LossSpec(path="rlcore.testing.fakes.loss:fake_regression", config=FakeRegressionConfig())
            return TrainingBatch(batch=batch, loss=values)
        if self.config.source == "demonstrations":
            loss = LossSpec(path="rlcore.testing.fakes.loss:fake_likelihood", config=FakeLikelihoodConfig())
            return TrainingBatch(batch=batch, loss=loss)
        if self.config.source == "preferences":
            preference = FakePreferenceConfig(reference=self.config.kl_coefficient > 0.0)
            return TrainingBatch(
                batch=batch, loss=LossSpec(path="rlcore.testing.fakes.loss:fake_preference", config=preference)
            )
        if self.config.critic:
            return self.build_with_critic(rollouts)
        advantages = group_advantages(rollouts)
        per_token = np.where(batch.loss_mask, np.repeat(advantages, batch.lengths), 0).astype(np.float32)
        return TrainingBatch(
            batch=batch.with_token_column(ADVANTAGES, per_token),
            loss=self.loss(),
            metrics={"advantage/max": float(np.abs(advantages).max(initial=0.0))},
            no_signal=None if advantages.any() else "the rewards of every group are equal",
            has_signal=None if self.config.kl_coefficient or self.config.entropy_coefficient else advantages != 0,
        )

    def measure_values(self, examples: RolloutBatch, values: Float32Array) -> Mapping[str, float]:
        """The mean of the values after the loss tokens."""
        return {"value_mean": float(values[examples.batch.loss_mask].mean())}

    def build_with_critic(self, rollouts: RolloutBatch) -> TrainingBatch:
        """A token's advantage is its sample's reward less the value before it."""
        batch = rollouts.batch
        rewards = np.where(batch.loss_mask, np.repeat(rollouts.rewards, batch.lengths), 0).astype(np.float32)
        before = np.where(batch.loss_mask, np.roll(batch.token_columns[VALUES], 1), 0).astype(np.float32)
        batch = batch.with_token_column(ADVANTAGES, rewards - before).with_token_column(TOKEN_REWARDS, rewards)
        critic_loss = LossSpec(
            path="rlcore.testing.fakes.loss:fake_value_error", config=FakeRegressionConfig(), token_columns=(TOKEN_REWARDS,)
        )
        return TrainingBatch(batch=batch, loss=self.loss(), critic_loss=critic_loss)

    def loss(self) -> LossSpec:
        """The policy gradient, with the columns and the entropy that its coefficients ask for."""
        reference = (REFERENCE_LOGPROBS,) if self.config.kl_coefficient > 0.0 else ()
        generation = (GENERATION_LOGPROBS,) if self.config.generation_ratio else ()
        return LossSpec(
            path="rlcore.testing.fakes.loss:fake_policy_gradient",
            config=FakePolicyGradientConfig(
                importance_ratio=self.config.previous_logprobs,
                generation_ratio=self.config.generation_ratio,
                entropy_coefficient=self.config.entropy_coefficient,
                kl_coefficient=self.config.kl_coefficient,
            ),
            token_columns=(ADVANTAGES, *generation, *reference),
            entropy="loss" if self.config.entropy_coefficient > 0.0 else "metric",
        )


def group_advantages(rollouts: RolloutBatch) -> Float64Array:
    """float64 [N]: reward less the mean of the group's valid samples; 0.0 where not valid."""
    valid = rollouts.valid.astype(np.float64)
    totals = np.bincount(rollouts.group_ids, rollouts.rewards * valid)
    means = totals / np.maximum(np.bincount(rollouts.group_ids, valid), 1.0)
    return np.asarray((rollouts.rewards - means[rollouts.group_ids]) * valid)
