"""Learning from preferences on the driver: the pairs are the training batch."""

from collections.abc import Mapping

import numpy as np

from rlcore.spi import AlgorithmContext, AlgorithmNeeds, LossSpec, RolloutBatch, TrainingBatch
from rlcore.spi.arrays import Float32Array
from rlcore_dpo.config import DpoConfig


class Dpo:
    """Direct preference optimisation; what a pair counts is decided in the loss."""

    def __init__(self, context: AlgorithmContext, config: DpoConfig) -> None:
        del context
        self._config = config
        self.needs = AlgorithmNeeds(source="preferences", whole_groups=True, reference_logprobs=config.reference == "initial")
        self._loss = LossSpec(path="rlcore_dpo.loss:dpo_loss", config=config)

    def build_batch(self, rollouts: RolloutBatch) -> TrainingBatch:
        """The pairs as they are; their loss mask covers the answers."""
        return TrainingBatch(batch=rollouts.batch, loss=self._loss)

    def measure(self, examples: RolloutBatch, logprobs: Float32Array, reference: Float32Array | None) -> Mapping[str, float]:
        """`rewards/margins` and `rewards/accuracies`, as the loss reports them of what it trains on."""
        batch = examples.batch
        scores = np.where(batch.loss_mask, logprobs if reference is None else logprobs - reference, 0.0).astype(np.float64)
        sums = np.add.reduceat(scores, batch.offsets[:-1])
        if self._config.length_normalised:
            sums /= np.maximum(batch.loss_lengths, 1)
        leads = sums[0::2] - sums[1::2]
        return {"rewards/margins": self._config.beta * float(leads.mean()), "rewards/accuracies": float((leads > 0).mean())}
