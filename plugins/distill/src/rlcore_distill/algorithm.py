"""Distillation on the driver: samples are the training batch as they are, and the teacher is the loop's reference."""

from collections.abc import Mapping

import numpy as np

from rlcore import spi
from rlcore.spi.arrays import Float32Array
from rlcore_distill.config import DistillConfig

LOSSES = {"student": "rlcore_distill.loss:reverse_kl_loss", "teacher": "rlcore_distill.loss:forward_kl_loss"}


class Distill:
    """Brings the policy's distribution to the teacher's."""

    def __init__(self, context: spi.AlgorithmContext, config: DistillConfig) -> None:
        del context
        sampled = config.samples == "student"
        self.needs = spi.AlgorithmNeeds(
            source="rollouts" if sampled else "demonstrations",
            reference_logprobs=True,
            reference_model=True,
            rewards=False,
            untruncated_sampling=sampled,
            corrects_staleness=sampled,
        )
        columns = (spi.REFERENCE_LOGPROBS, spi.GENERATION_LOGPROBS) if sampled else (spi.REFERENCE_LOGPROBS,)
        self._loss = spi.LossSpec(path=LOSSES[config.samples], config=config, token_columns=columns)

    def build_batch(self, rollouts: spi.RolloutBatch) -> spi.TrainingBatch:
        """Every token that was sampled, or that the teacher wrote; rewards are reported, and play no part."""
        return spi.TrainingBatch(batch=rollouts.batch, loss=self._loss)

    def measure(
        self, examples: spi.RolloutBatch, logprobs: Float32Array, reference: Float32Array | None
    ) -> Mapping[str, float]:
        """`forward_kl`, as the loss on the teacher's texts reports it: nats per token."""
        assert reference is not None, "needs.reference_logprobs"
        gaps = (reference - logprobs)[examples.batch.loss_mask].astype(np.float64)
        return {"forward_kl": float(gaps.mean()) if len(gaps) else 0.0}
