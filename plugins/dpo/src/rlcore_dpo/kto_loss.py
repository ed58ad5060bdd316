"""The loss of labelled answers, run inside every trainer."""

import torch

from rlcore.spi import REFERENCE_LOGPROBS, LossInputs, LossOutput
from rlcore_dpo.kto_config import KtoConfig
from rlcore_dpo.loss import per_sequence

DESIRABLE = "desirable"
"""float32 [N], a sequence column: 1.0 for a desirable answer, else 0.0."""
KL = "kl_estimate"
"""float32 [N], a sequence column: z, the same for all sequences of a step."""


def kto_loss(inputs: LossInputs, config: KtoConfig) -> LossOutput:
    """The mean over the optimizer step's answers of λ (1 - σ(s β (r - z))), where r = Σ (logprobs - reference) over an answer's
    tokens; s = 1 and λ = `desirable_weight` for a desirable answer, and s = -1 and λ = `undesirable_weight` for another
    (arXiv:2402.01306, equations 7 and 8). z is the column KL.

    Metrics, means over the answers: `rewards/margins`, s β (r - z); `rewards/accuracies`, the share where it is above 0;
    `logps`, the answers' log-probabilities, summed over their tokens.
    """
    num_answers = max(inputs.counts.num_loss_sequences, 1)
    # Token by token first: a difference of two sums over thousands of tokens would lose what is learned.
    ratios = per_sequence(inputs.logprobs - inputs.token_columns[REFERENCE_LOGPROBS], inputs)
    counted = per_sequence(torch.ones_like(inputs.logprobs), inputs) > 0  # False for what fills an empty microbatch
    desirable = inputs.sequence_columns[DESIRABLE] > 0
    kl = inputs.sequence_columns[KL].to(ratios.dtype)

    def mean(values: torch.Tensor) -> torch.Tensor:
        return torch.where(counted, values, 0.0).sum() / num_answers

    margins = config.beta * torch.where(desirable, ratios - kl, kl - ratios)
    weights = torch.where(desirable, config.desirable_weight, config.undesirable_weight)
    loss = mean(weights * torch.sigmoid(-margins))
    with torch.no_grad():
        sums = {
            "rewards/margins": mean(margins),
            "rewards/accuracies": mean((margins > 0).to(margins.dtype)),
            "logps": mean(per_sequence(inputs.logprobs, inputs)),
        }
    return LossOutput(loss=loss, sums=sums)
