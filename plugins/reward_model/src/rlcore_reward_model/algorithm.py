"""Learning a reward model on the driver: the pairs are the training batch."""

from collections.abc import Mapping

import numpy as np

from rlcore.spi import AlgorithmContext, AlgorithmNeeds, LossSpec, RolloutBatch, TrainingBatch
from rlcore.spi.arrays import Float32Array
from rlcore_reward_model.config import RewardConfig


class RewardAlgorithm:
    """A reward model of preferences; what a pair counts is decided in the loss."""

    def __init__(self, context: AlgorithmContext, config: RewardConfig) -> None:
        del context
        self.needs = AlgorithmNeeds(source="preferences", margins=True, whole_groups=True, head="value")
        self._loss = LossSpec(path="rlcore_reward_model.loss:reward_loss", config=config)

    def build_batch(self, rollouts: RolloutBatch) -> TrainingBatch:
        """The pairs as they are."""
        return TrainingBatch(batch=rollouts.batch, loss=self._loss)

    def measure_values(self, examples: RolloutBatch, values: Float32Array) -> Mapping[str, float]:
        """The loss's metrics, of the held-out pairs."""
        rewards = values[examples.batch.offsets[1:] - 1].astype(np.float64)
        chosen, rejected = rewards[0::2], rewards[1::2]
        return {
            "rewards/chosen": float(chosen.mean()),
            "rewards/rejected": float(rejected.mean()),
            "rewards/margins": float((chosen - rejected).mean()),
            "rewards/accuracies": float((chosen > rejected).mean()),
        }
