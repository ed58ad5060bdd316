"""GRPO on the driver: rewards to a training batch."""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rlcore import spi
from rlcore_grpo.config import GrpoConfig
from rlcore_torchkit.rl.advantages import group_advantages


class Grpo:
    """Group relative policy optimisation; its variants are options of GrpoConfig."""

    def __init__(self, context: spi.AlgorithmContext, config: GrpoConfig) -> None:
        self.config = config.resolved(context)
        self._loss = _loss_spec(self.config)
        self.needs = spi.AlgorithmNeeds(
            source="rollouts",
            previous_logprobs=self.config.previous_logprobs == "trainer",
            reference_logprobs=spi.REFERENCE_LOGPROBS in self._loss.token_columns,
            entropy=self._loss.entropy != "none",
            min_samples_per_prompt=2,
            untruncated_sampling=True,
        )

    def build_batch(self, rollouts: spi.RolloutBatch) -> spi.TrainingBatch:
        """One advantage a sample, the same for each of its loss tokens."""
        advantages = self._advantages(rollouts)
        batch = rollouts.batch
        per_token = np.repeat(advantages, batch.lengths)
        np.copyto(per_token, np.float32(0), where=~batch.loss_mask)
        return spi.TrainingBatch(
            batch=batch.with_token_column(spi.ADVANTAGES, per_token),
            loss=self._loss,
            metrics=_metrics(rollouts, advantages),
            no_signal=self._no_signal(rollouts, advantages),
            has_signal=None if self._has_other_terms else advantages != 0,
        )

    def _advantages(self, rollouts: spi.RolloutBatch) -> NDArray[np.float32]:
        """float32 [N]: 0.0 where `valid` is False."""
        advantages = np.zeros(len(rollouts.rewards), np.float32)
        advantages[rollouts.valid] = group_advantages(
            rollouts.rewards[rollouts.valid],
            rollouts.group_ids[rollouts.valid],
            baseline=self.config.advantage_baseline,
            normalisation=self.config.advantage_normalisation,
            epsilon=self.config.advantage_epsilon,
        )
        return advantages

    def _no_signal(self, rollouts: spi.RolloutBatch, advantages: NDArray[np.float32]) -> str | None:
        if not rollouts.batch.loss_mask.any():
            return "no sample has a token to train on"
        if advantages.any() or self._has_other_terms:
            return None
        num_groups = len(np.unique(rollouts.group_ids[rollouts.valid]))
        return f"the rewards of each of the {num_groups} groups are all equal"

    @property
    def _has_other_terms(self) -> bool:
        """Whether a sample without an advantage has a gradient all the same."""
        return bool(self.config.kl_coefficient or self.config.entropy_coefficient)


def _loss_spec(config: GrpoConfig) -> spi.LossSpec:
    """The loss, and what it reads with these options."""
    entropy: Literal["none", "metric", "loss"] = "metric" if config.entropy_metric == "exact" else "none"
    reference = (spi.REFERENCE_LOGPROBS,) if config.kl_coefficient else ()
    return spi.LossSpec(
        path="rlcore_grpo.loss:grpo_loss",
        config=config,
        token_columns=(spi.ADVANTAGES, spi.GENERATION_LOGPROBS, *reference),
        entropy="loss" if config.entropy_coefficient else entropy,
    )


def _metrics(rollouts: spi.RolloutBatch, advantages: NDArray[np.float32]) -> dict[str, float]:
    """`advantage_max` is the largest magnitude; `zero_advantage_groups` the share of groups without a signal."""
    groups, group_of = np.unique(rollouts.group_ids, return_inverse=True)
    largest = np.zeros(len(groups), np.float32)
    np.maximum.at(largest, group_of, np.abs(advantages))
    return {
        "advantage_max": float(largest.max(initial=0.0)),
        "zero_advantage_groups": float(np.mean(largest == 0)) if len(groups) else 0.0,
    }
