"""Distillation on the driver: samples are the training batch as they are, and the teacher is the loop's reference."""

from rlcore import spi
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
            untruncated_sampling=sampled,
            corrects_staleness=sampled,
        )
        columns = (spi.REFERENCE_LOGPROBS, spi.GENERATION_LOGPROBS) if sampled else (spi.REFERENCE_LOGPROBS,)
        self._loss = spi.LossSpec(path=LOSSES[config.samples], config=config, token_columns=columns)

    def build_batch(self, rollouts: spi.RolloutBatch) -> spi.TrainingBatch:
        """Every token that was sampled, or that the teacher wrote; rewards are reported, and play no part."""
        return spi.TrainingBatch(batch=rollouts.batch, loss=self._loss)
