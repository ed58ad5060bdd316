"""Distillation on the driver: samples are the training batch; the teacher is the loop's reference, or behind an endpoint."""

from collections.abc import Mapping

import numpy as np

from rlcore import spi
from rlcore.spi.arrays import Float32Array
from rlcore_distill.config import DistillConfig
from rlcore_distill.teachers import Teachers

LOSSES = {"student": "rlcore_distill.loss:reverse_kl_loss", "teacher": "rlcore_distill.loss:forward_kl_loss"}


class Distill:
    """Brings the policy's distribution to the teacher's."""

    def __init__(self, context: spi.AlgorithmContext, config: DistillConfig) -> None:
        sampled = config.samples == "student"
        self._teachers = Teachers(config.teachers, context) if config.teachers else None
        self.needs = spi.AlgorithmNeeds(
            source="rollouts" if sampled else "demonstrations",
            reference_logprobs=self._teachers is None,
            reference_model=self._teachers is None,
            rewards=False,
            untruncated_sampling=sampled,
            corrects_staleness=sampled,
        )
        columns = (spi.REFERENCE_LOGPROBS, spi.GENERATION_LOGPROBS) if sampled else (spi.REFERENCE_LOGPROBS,)
        self._loss = spi.LossSpec(path=LOSSES[config.samples], config=config, token_columns=columns)

    def build_batch(self, rollouts: spi.RolloutBatch) -> spi.TrainingBatch:
        """Every token that was sampled, or that the teacher wrote; rewards are reported, and play no part."""
        batch, metrics = rollouts.batch, dict[str, float]()
        if self._teachers is not None:
            column, metrics = self._teachers.column(batch)
            batch = batch.with_token_column(spi.REFERENCE_LOGPROBS, column)
        return spi.TrainingBatch(batch=batch, loss=self._loss, metrics=metrics)

    def measure(
        self, examples: spi.RolloutBatch, logprobs: Float32Array, reference: Float32Array | None
    ) -> Mapping[str, float]:
        """`forward_kl`, as the loss on the teacher's texts reports it: nats per token."""
        assert reference is not None, "needs.reference_logprobs"
        gaps = (reference - logprobs)[examples.batch.loss_mask].astype(np.float64)
        return {"forward_kl": float(gaps.mean()) if len(gaps) else 0.0}
