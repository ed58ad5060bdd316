"""Supervised fine-tuning on the driver: demonstrations are the training batch."""

from rlcore.spi import AlgorithmContext, AlgorithmNeeds, LossSpec, RolloutBatch, TrainingBatch
from rlcore_sft.config import SftConfig


class Sft:
    """Maximum likelihood of the completions given their prompts."""

    def __init__(self, context: AlgorithmContext, config: SftConfig) -> None:
        del context
        self.needs = AlgorithmNeeds(source="demonstrations")
        self._loss = LossSpec(path="rlcore_sft.loss:sft_loss", config=config)

    def build_batch(self, rollouts: RolloutBatch) -> TrainingBatch:
        """The demonstrations as they are; their loss mask covers the completions."""
        empty = None if rollouts.batch.loss_mask.any() else "no completion has a token to train on"
        return TrainingBatch(batch=rollouts.batch, loss=self._loss, no_signal=empty)
