"""KTO on the driver: the step's KL estimate, and the labelled answers as the training batch."""

from collections.abc import Mapping

import numpy as np
from attrs import evolve
from numpy.typing import NDArray

from rlcore import spi
from rlcore.spi.arrays import AnyArray, Float32Array
from rlcore_dpo.kto_config import KtoConfig
from rlcore_dpo.kto_loss import DESIRABLE, KL


class Kto:
    """Kahneman-Tversky optimisation; what an answer counts is decided in the loss."""

    def __init__(self, context: spi.AlgorithmContext, config: KtoConfig) -> None:
        del context
        self._config = config
        self._estimates_kl = config.loss == "kto"
        self.needs = spi.AlgorithmNeeds(
            source="labelled",
            reference_logprobs=True,
            reference_logprobs_in_rollouts=self._estimates_kl,
            policy_logprobs_in_rollouts=self._estimates_kl,
        )
        columns = (spi.REFERENCE_LOGPROBS,) if self._estimates_kl else ()
        self._loss = spi.LossSpec(path="rlcore_dpo.kto_loss:kto_loss", config=config, token_columns=columns)

    def build_batch(self, rollouts: spi.RolloutBatch) -> spi.TrainingBatch:
        """The rows' own answers, with their labels and the step's KL estimate. The other rows' answers are left out."""
        batch, kl = rollouts.batch, 0.0
        if self._estimates_kl:
            policy, reference = (batch.token_columns[name] for name in (spi.PREVIOUS_LOGPROBS, spi.REFERENCE_LOGPROBS))
            kl = _kl_estimate(_log_ratios(batch, policy, reference))
        answers = np.arange(0, batch.num_sequences, 2)
        kept = batch.select(answers)
        columns: dict[str, AnyArray] = {
            **kept.sequence_columns,
            DESIRABLE: rollouts.rewards[answers],
            KL: np.full(len(answers), kl, np.float32),
        }
        read = {name: kept.token_columns[name] for name in self._loss.token_columns}
        return spi.TrainingBatch(
            batch=evolve(kept, token_columns=read, sequence_columns=columns), loss=self._loss, metrics={"kl": kl}
        )

    def measure(
        self, examples: spi.RolloutBatch, logprobs: Float32Array, reference: Float32Array | None
    ) -> Mapping[str, float]:
        """`rewards/margins`, `rewards/accuracies` and `kl`, as a step reports them of what it trains on."""
        assert reference is not None, "needs.reference_logprobs"
        ratios = _log_ratios(examples.batch, logprobs, reference)
        kl = _kl_estimate(ratios) if self._estimates_kl else 0.0
        margins = self._config.beta * np.where(examples.rewards[0::2] > 0, 1, -1) * (ratios[0::2] - kl)
        return {"rewards/margins": float(margins.mean()), "rewards/accuracies": float((margins > 0).mean()), "kl": kl}


def _log_ratios(batch: spi.TokenBatch, policy: Float32Array, reference: Float32Array) -> NDArray[np.float64]:
    """float64 [N]: Σ (policy - reference) over each sequence's loss tokens."""
    gaps = np.where(batch.loss_mask, policy.astype(np.float64) - reference, 0.0)
    sums: NDArray[np.float64] = np.add.reduceat(gaps, batch.offsets[:-1])
    return sums


def _kl_estimate(ratios: NDArray[np.float64]) -> float:
    """z = max(0, mean of r over the prompts with other rows' answers) (arXiv:2402.01306, section 4.1)."""
    return max(float(ratios[1::2].mean()), 0.0)
