"""Rewards less their mean over the step, times the log-probabilities (Williams, 1992)."""

import numpy as np

from rlcore import spi


class NewPlugin:
    def __init__(self, context, config):
        self.config = config
        self.needs = spi.AlgorithmNeeds(source="rollouts")
        self.loss = spi.LossSpec(
            path="rlcore_newplugin.backend:policy_gradient_loss", config=config, token_columns=(spi.ADVANTAGES,)
        )

    def build_batch(self, rollouts):
        """Runs in the driver, in numpy: what the samples of a step teach."""
        batch, valid = rollouts.batch, rollouts.valid
        advantages = np.zeros_like(rollouts.rewards)
        if valid.any():
            advantages[valid] = rollouts.rewards[valid] - rollouts.rewards[valid].mean()
        if self.config.positive_only:
            advantages = advantages.clip(min=0)
        per_token = np.where(batch.loss_mask, np.repeat(advantages, batch.lengths), np.float32(0))
        return spi.TrainingBatch(
            batch=batch.with_token_column(spi.ADVANTAGES, per_token),
            loss=self.loss,
            no_signal=None if per_token.any() else "all rewards of the step are equal",
        )


def policy_gradient_loss(inputs, config):
    """Runs in the trainer, in torch, on one microbatch: divide by the global counts only."""
    weighted = inputs.logprobs * inputs.token_columns[spi.ADVANTAGES]
    return spi.LossOutput(loss=-weighted.sum() / inputs.counts.num_loss_tokens)
