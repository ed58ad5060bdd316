"""Distillation on the driver: samples are the training batch; the teacher is the loop's reference, or behind an endpoint."""

from collections.abc import Mapping, Sequence

import numpy as np

from rlcore import spi
from rlcore.spi.arrays import Float32Array
from rlcore_distill.answers import RowAnswers
from rlcore_distill.config import DistillConfig
from rlcore_distill.gkd import PART_WEIGHTS, TEACHER_TEXT
from rlcore_distill.teachers import Teachers

OF_SAMPLES, OF_TEXTS = (spi.REFERENCE_LOGPROBS, spi.GENERATION_LOGPROBS), (spi.REFERENCE_LOGPROBS,)
LOSSES = {
    "reverse_kl": ("rlcore_distill.loss:reverse_kl_loss", OF_SAMPLES),
    "forward_kl": ("rlcore_distill.loss:forward_kl_loss", OF_TEXTS),
    "sampled": ("rlcore_distill.gkd:sampled_gkd_loss", OF_SAMPLES),
    "teacher": ("rlcore_distill.gkd:teacher_gkd_loss", OF_TEXTS),
    "mixed": ("rlcore_distill.gkd:mixed_gkd_loss", (*OF_SAMPLES, TEACHER_TEXT, PART_WEIGHTS)),
}
"""The path of each loss, and the token columns that it reads."""


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
        self._share = config.lmbda
        self._answers = RowAnswers(context.max_response_tokens) if config.lmbda < 1 else None
        path, columns = LOSSES[loss_name(config)]
        self._loss = spi.LossSpec(path=path, config=config, token_columns=columns)

    def read_rows(self, rows: Sequence[spi.Row], tokenizer: spi.Tokenizer) -> None:
        """Check the answers of the rows, where the loss has a part of them."""
        if self._answers is not None:
            self._answers.read_rows(rows, tokenizer)

    def build_batch(self, rollouts: spi.RolloutBatch) -> spi.TrainingBatch:
        """Every token that was sampled, or that the teacher wrote; rewards are reported, and play no part. With `lmbda` below 1
        both: each group's samples, and behind them its prompt with its row's answer."""
        batch, metrics = rollouts.batch, dict[str, float]()
        if self._answers is not None:
            batch = self._answers.beside(rollouts, self._share)
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


def loss_name(config: DistillConfig) -> str:
    """Return the key in LOSSES of what a configuration learns by."""
    if config.samples == "teacher":
        return "teacher" if config.beta_of_texts else "forward_kl"
    if config.lmbda < 1:
        return "mixed"
    return "sampled" if config.beta_of_samples < 1 else "reverse_kl"
