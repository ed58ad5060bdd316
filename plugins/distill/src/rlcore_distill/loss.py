"""Divergences from the teacher, run inside every trainer. The teacher's log-probabilities are the reference's.

Both are means over the loss tokens of the optimizer step, in nats per token, and 0 where policy and teacher agree.
"""

import torch
from torch import Tensor

from rlcore.spi import GENERATION_LOGPROBS, REFERENCE_LOGPROBS, LossInputs, LossOutput
from rlcore_distill.config import DistillConfig
from rlcore_distill.self_config import SelfDistillConfig
from rlcore_torchkit.rl.policy_gradient import importance_ratio
from rlcore_torchkit.rl.sequences import MaskedMean, masked

MAX_LOG_RATIO = 20.0
"""Nats beyond which a token's probabilities are not told further apart, so that one impossible token is no whole gradient."""


def reverse_kl_loss(inputs: LossInputs, config: DistillConfig | SelfDistillConfig) -> LossOutput:
    """An estimate of KL(policy ‖ teacher), whose gradient is that of its expectation over the policy's samples.

    d_t = current_t - teacher_t of a token that was drawn from the policy is an unbiased estimate at its prefix, and by the
    score function ∇E[d] = E[d ∇current] (Williams, 1992). With a discount γ the gradient has Σ_{l≥t} γ^{l-t} d_l in place of
    d_t, over the loss tokens of the sequence. Tokens of an older policy weigh min(exp(current - generation),
    config.importance_maximum).

    Metrics: `reverse_kl`, the mean of d; `importance_truncated`, the share of tokens at that bound.
    """
    current = masked(inputs.logprobs, inputs)
    divergence = (current.detach() - masked(inputs.token_columns[REFERENCE_LOGPROBS], inputs)).clamp(
        -MAX_LOG_RATIO, MAX_LOG_RATIO
    )
    ratio = importance_ratio(current, masked(inputs.token_columns[GENERATION_LOGPROBS], inputs))
    ahead = divergence if config.discount == 0 else discounted(divergence, inputs, config.discount)
    # current - stopgrad(current) is 0, and its gradient ∇ current: the value stays the divergence's.
    per_token = ratio.clamp(max=config.importance_maximum) * (divergence + ahead * (current - current.detach()))
    mean = MaskedMean(inputs.loss_mask, inputs.counts)
    return LossOutput(
        loss=torch.where(inputs.loss_mask, per_token, 0.0).sum() / max(inputs.counts.num_loss_tokens, 1),
        sums={"reverse_kl": mean(divergence), "importance_truncated": mean(ratio > config.importance_maximum)},
    )


def forward_kl_loss(inputs: LossInputs, config: DistillConfig) -> LossOutput:
    """An estimate of KL(teacher ‖ policy) on what the teacher wrote: teacher_t - current_t, whose gradient is the likelihood's.

    Metric: `forward_kl`, the same.
    """
    del config
    teacher = masked(inputs.token_columns[REFERENCE_LOGPROBS], inputs)
    divergence = teacher - masked(inputs.logprobs, inputs)
    mean = MaskedMean(inputs.loss_mask, inputs.counts)
    return LossOutput(
        loss=divergence.sum() / max(inputs.counts.num_loss_tokens, 1),
        sums={"forward_kl": mean(divergence)},
    )


def discounted(values: Tensor, inputs: LossInputs, discount: float) -> Tensor:
    """[T]: Σ_{l≥t} discount^{l-t} values_l over the loss tokens of the same sequence, where other tokens are no steps.

    By doubling: after k rounds each token has the sum over the next 2^k tokens, so that a sequence of length n takes log2(n)
    passes over all tokens, without a loop over them.
    """
    numbers = torch.arange(len(values), device=values.device)
    sequence = torch.bucketize(numbers, inputs.offsets[1:], right=True)
    order = torch.argsort(sequence * 2 + ~inputs.loss_mask, stable=True)  # of each sequence, its loss tokens first
    sums, owner = values[order].double(), (sequence * 2 + ~inputs.loss_mask)[order]
    step, factor = 1, discount
    while step < len(values):
        follows = torch.zeros_like(sums)
        follows[:-step] = torch.where(owner[:-step] == owner[step:], sums[step:], 0.0)
        sums = sums + factor * follows
        step, factor = 2 * step, factor * factor
    return torch.empty_like(values).scatter_(0, order, sums.to(values.dtype))
