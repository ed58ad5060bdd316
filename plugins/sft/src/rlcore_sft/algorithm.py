"""Supervised fine-tuning on the driver: demonstrations are the training batch."""

from collections.abc import Mapping

import numpy as np

from rlcore.spi import AlgorithmContext, AlgorithmNeeds, LossSpec, RolloutBatch, TrainingBatch
from rlcore.spi.arrays import Float32Array
from rlcore_sft.config import SftConfig

MAX_LOSS = 700.0
"""Nats whose exponential is finite in float64."""


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

    def measure(self, examples: RolloutBatch, logprobs: Float32Array, reference: Float32Array | None) -> Mapping[str, float]:
        """`loss`, the mean negative log-likelihood of a token in nats, and `perplexity`, its exponential."""
        del reference
        learned = logprobs[examples.batch.loss_mask].astype(np.float64)
        loss = -float(learned.mean()) if len(learned) else 0.0
        return {"loss": loss, "perplexity": float(np.exp(min(loss, MAX_LOSS)))}
