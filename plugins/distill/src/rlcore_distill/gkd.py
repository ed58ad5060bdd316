"""Generalised knowledge distillation (arXiv:2306.13649), run inside every trainer: a generalised Jensen-Shannon divergence.

With the teacher T, the policy P and M = β T + (1 - β) P, the divergence at a position is D = β KL(T ‖ M) + (1 - β) KL(P ‖ M)
(equation 1). As in TRL's GKDTrainer, D is KL(T ‖ P) for β = 0 and KL(P ‖ T) for β = 1. D is an f-divergence: with r = T / P of
a token,

    D = E_P[f(r)],  ∇D = E_P[w(r) ∇log P],  w(r) = f(r) - r f'(r), up to a constant

by the score function (Williams, 1992), so that one token drawn from P is an unbiased estimate at its prefix. A token drawn from
another distribution S weighs P / S: S is the policy that sampled it, or the teacher that wrote it.
"""

import math

import torch
from attrs import frozen
from torch import Tensor

from rlcore.spi import GENERATION_LOGPROBS, REFERENCE_LOGPROBS, LossInputs, LossOutput
from rlcore_distill.config import DistillConfig
from rlcore_distill.loss import MAX_LOG_RATIO, discounted
from rlcore_torchkit.rl.policy_gradient import importance_ratio
from rlcore_torchkit.rl.sequences import MaskedMean, masked

TEACHER_TEXT = "teacher_text"
"""bool [T], a token column: True for a token that the teacher wrote, False for a sampled one."""
PART_WEIGHTS = "part_weights"
"""float32 [T], a token column: the weight of a token in the mean over both parts of a step; 0.0 where loss_mask is False."""


@frozen(eq=False)
class Estimate:
    """The estimate of D at one token of each position, [T] each."""

    ratio: Tensor
    """min(P / S, config.importance_maximum), without a gradient."""
    divergence: Tensor
    """f(r), without a gradient."""
    weight: Tensor
    """w(r), without a gradient."""


def sampled_gkd_loss(inputs: LossInputs, config: DistillConfig) -> LossOutput:
    """The mean of D over the policy's own samples, in nats per token. With a discount γ the weight of a token includes
    Σ_{l>t} γ^{l-t} f(r_l) over the later loss tokens of its sequence.

    Metrics: `generalized_jsd`, the mean of f(r); `importance_truncated`, the share of tokens at `importance_maximum`.
    """
    current, teacher = _logprobs(inputs)
    found = _sampled(inputs, config, current, teacher)
    return _output(inputs, config, found, current, torch.ones_like(current))


def teacher_gkd_loss(inputs: LossInputs, config: DistillConfig) -> LossOutput:
    """The mean of D over texts that the teacher wrote, in nats per token. Metrics: those of `sampled_gkd_loss`, of which
    `generalized_jsd` is the mean of min(P / T, `importance_maximum`) f(r)."""
    current, teacher = _logprobs(inputs)
    return _output(inputs, config, _written(config, current, teacher), current, torch.ones_like(current))


def mixed_gkd_loss(inputs: LossInputs, config: DistillConfig) -> LossOutput:
    """λ times the mean of D over the policy's samples and 1 - λ times that over the teacher's texts, by the columns
    PART_WEIGHTS and TEACHER_TEXT. Metrics: those of `teacher_gkd_loss`, weighted likewise."""
    current, teacher = _logprobs(inputs)
    is_written, weights = inputs.token_columns[TEACHER_TEXT], masked(inputs.token_columns[PART_WEIGHTS], inputs)
    own, other = _sampled(inputs, config, current, teacher), _written(config, current, teacher)
    found = Estimate(
        torch.where(is_written, other.ratio, own.ratio),
        torch.where(is_written, other.divergence, own.divergence),
        torch.where(is_written, other.weight, own.weight),
    )
    return _output(inputs, config, found, current, weights)


def divergence_terms(log_ratio: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """f(r) and w(r), [T] each, of log r = log T - log P; w(1) is 0.

    - 0 < β < 1, with m = β r + 1 - β: f = β r log(r / m) - (1 - β) log m, w = -(1 - β) log m;
    - β = 1: f = w = -log r;
    - β = 0: f = r log r, w = 1 - r.
    """
    if beta == 1:
        return -log_ratio, -log_ratio
    ratio = log_ratio.exp()
    if beta == 0:
        return ratio * log_ratio, 1 - ratio
    log_mean = torch.logaddexp(log_ratio + math.log(beta), torch.full_like(log_ratio, math.log1p(-beta)))
    weight = -(1 - beta) * log_mean
    return beta * ratio * (log_ratio - log_mean) + weight, weight


def _logprobs(inputs: LossInputs) -> tuple[Tensor, Tensor]:
    """The policy's log-probabilities, with a gradient, and the teacher's, [T] each; 0 outside the loss mask."""
    return masked(inputs.logprobs, inputs), masked(inputs.token_columns[REFERENCE_LOGPROBS], inputs)


def _log_ratio(current: Tensor, teacher: Tensor) -> Tensor:
    return (teacher - current.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _sampled(inputs: LossInputs, config: DistillConfig, current: Tensor, teacher: Tensor) -> Estimate:
    """The estimate at tokens of the policy's samples."""
    divergence, weight = divergence_terms(_log_ratio(current, teacher), config.beta_of_samples)
    if config.discount:
        weight = weight + discounted(divergence, inputs, config.discount) - divergence
    ratio = importance_ratio(current, masked(inputs.token_columns[GENERATION_LOGPROBS], inputs))
    return Estimate(ratio, divergence, weight)


def _written(config: DistillConfig, current: Tensor, teacher: Tensor) -> Estimate:
    """The estimate at tokens of the teacher's texts. For β = 0, P / T times f and times -r, the w without its constant: log r
    and -1, whose gradient is the likelihood's."""
    log_ratio, beta = _log_ratio(current, teacher), config.beta_of_texts
    if beta == 0:
        return Estimate(torch.ones_like(log_ratio), log_ratio, -torch.ones_like(log_ratio))
    return Estimate((-log_ratio).exp(), *divergence_terms(log_ratio, beta))


def _output(inputs: LossInputs, config: DistillConfig, found: Estimate, current: Tensor, weights: Tensor) -> LossOutput:
    ratio = weights * found.ratio.clamp(max=config.importance_maximum)
    # current - stopgrad(current) is 0, and its gradient ∇ current: the value stays the divergence's.
    per_token = ratio * (found.divergence + found.weight * (current - current.detach()))
    mean = MaskedMean(inputs.loss_mask, inputs.counts)
    return LossOutput(
        loss=torch.where(inputs.loss_mask, per_token, 0.0).sum() / max(inputs.counts.num_loss_tokens, 1),
        sums={
            "generalized_jsd": mean(ratio * found.divergence),
            "importance_truncated": mean(found.ratio > config.importance_maximum),
        },
    )
