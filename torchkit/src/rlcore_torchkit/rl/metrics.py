"""Figures of a microbatch, each a part of a mean over all loss tokens of the optimizer step, or a maximum."""

import torch
from attrs import frozen
from torch import Tensor

from rlcore.spi import GlobalCounts
from rlcore_torchkit.rl.correction import importance_ratio
from rlcore_torchkit.rl.objective import Objective
from rlcore_torchkit.rl.sequences import Sequences

MAX_DIFFERENCE = 50.0
"""The largest difference in nats that is told apart; e⁵⁰ times any number of tokens is finite in float32."""


@frozen(eq=False)
class MaskedMean:
    """Sum over the mask divided by the global number of loss tokens."""

    loss_mask: Tensor
    counts: GlobalCounts

    def __call__(self, values: Tensor) -> Tensor:
        """Detached scalar of `values` [T], bool counting as 0 and 1."""
        return torch.where(self.loss_mask, values.detach().float(), 0.0).sum() / max(self.counts.num_loss_tokens, 1)


def objective_means(objective: Objective, mean: MaskedMean) -> dict[str, Tensor]:
    """How far the policy has moved from the previous one, and the objective's own figures."""
    return {"ratio_mean": mean(objective.ratio), **{name: mean(values) for name, values in objective.figures.items()}}


def objective_maxima(objective: Objective, loss_mask: Tensor) -> dict[str, Tensor]:
    """The largest probability ratio; 0 where the microbatch has no loss token."""
    return {"ratio_max": torch.where(loss_mask, objective.ratio, 0.0).max()}


def mismatch(trainer: Tensor, generation: Tensor, mean: MaskedMean) -> dict[str, Tensor]:
    """MISMATCH_METRICS of the trainer's and the generator's log-probabilities, float32 [T] each, at the same weights.

    Weights with nothing in common are told by a large number and not by an infinite one.
    """
    trainer = trainer.detach()
    delta = (trainer - generation).clamp(-MAX_DIFFERENCE, MAX_DIFFERENCE)
    return {
        "token_mult_prob_error": mean(torch.exp(delta.abs())),
        "generation_kl_error": mean(torch.expm1(delta) - delta),
        "importance_ratio": mean(importance_ratio(trainer, generation)),
    }


def sequence_mismatch(trainer: Tensor, generation: Tensor, sequences: Sequences, counts: GlobalCounts) -> dict[str, Tensor]:
    """`sequence_log_ratio`: the mean over sequences of |Σ (trainer - generation)| over a sequence's loss tokens, in nats."""
    total = sequences.sum((trainer - generation).detach())
    return {"sequence_log_ratio": total.abs().sum() / max(counts.num_loss_sequences, 1)}


def sequence_maxima(trainer: Tensor, generation: Tensor, sequences: Sequences) -> dict[str, Tensor]:
    """The extremes over sequences of exp(mean of trainer - generation), the exponent within ±50: the greatest, and of the
    least its inverse; 0 where the microbatch has no loss token."""
    log_ratio = sequences.mean((trainer - generation).detach()).clamp(-MAX_DIFFERENCE, MAX_DIFFERENCE)
    there = sequences.num_tokens > 0
    return {
        "sequence_ratio_max": torch.where(there, log_ratio.exp(), 0.0).max(),
        "sequence_inverse_ratio_max": torch.where(there, (-log_ratio).exp(), 0.0).max(),
    }
