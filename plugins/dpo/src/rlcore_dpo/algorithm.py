"""Learning from preferences on the driver: the pairs are the training batch."""

from rlcore.spi import AlgorithmContext, AlgorithmNeeds, LossSpec, RolloutBatch, TrainingBatch
from rlcore_dpo.config import DpoConfig


class Dpo:
    """Direct preference optimisation; what a pair counts is decided in the loss."""

    def __init__(self, context: AlgorithmContext, config: DpoConfig) -> None:
        del context
        self.needs = AlgorithmNeeds(source="preferences", whole_groups=True, reference_logprobs=config.reference == "initial")
        self._loss = LossSpec(path="rlcore_dpo.loss:dpo_loss", config=config)

    def build_batch(self, rollouts: RolloutBatch) -> TrainingBatch:
        """The pairs as they are; their loss mask covers the answers."""
        return TrainingBatch(batch=rollouts.batch, loss=self._loss)
