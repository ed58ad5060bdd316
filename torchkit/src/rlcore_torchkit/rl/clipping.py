"""Objectives with hard bounds of the ratio ρ, per token: PPO's, CISPO's and GMPO's; and what guards the entropy instead."""

import math
from typing import TypedDict

import torch
from attrs import evolve
from torch import Tensor

from rlcore_torchkit.rl.objective import Objective
from rlcore_torchkit.rl.ratio import MAX_LOG_RATIO, ratio_of
from rlcore_torchkit.rl.sequences import Sequences


class ClipRange(TypedDict):
    """ρ is clipped at 1 - clip_low and 1 + clip_high."""

    clip_low: float
    clip_high: float


def clipped_objective(
    log_ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None
) -> Objective:
    """max(-A ρ, -A clamp(ρ, 1 - clip_low, 1 + clip_high)), ρ = exp(log_ratio); all arguments float32 [T].

    PPO (arXiv:1707.06347, equation 7) with DAPO's two bounds (arXiv:2503.14476, equation 10) and, where A < 0, the dual
    clip min(·, -A c) (arXiv:1912.09729, equation 5).
    """
    ratio = ratio_of(log_ratio)
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high))
    negative = advantages < 0
    dual_clipped = torch.zeros_like(negative)
    if dual_clip is not None:
        bound = -advantages * dual_clip
        dual_clipped = negative & (loss.detach() > bound)
        loss = torch.where(dual_clipped, bound, loss)
    ratio = ratio.detach()
    figures = _clipped(ratio, advantages, clip_low=clip_low, clip_high=clip_high)
    return Objective(loss=loss, ratio=ratio, figures={**figures, "dual_clip_fraction": dual_clipped})


def penalised_objective(log_ratio: Tensor, advantages: Tensor, chosen: Tensor, *, coefficient: float) -> Objective:
    """-A ρ, and at the tokens of `chosen` bool [T] coefficient · |log ρ| besides; log ρ = `log_ratio`, float32 [T] as A is.

    KL-Cov (arXiv:2505.22617), with the estimate of the divergence that its authors' code takes. No bound of the ratio.
    """
    ratio = ratio_of(log_ratio)
    penalty = coefficient * log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).abs()
    loss = -advantages * ratio + torch.where(chosen, penalty, 0.0)
    return Objective(loss=loss, ratio=ratio.detach(), figures={"high_covariance": chosen})


def without(objective: Objective, chosen: Tensor) -> Objective:
    """The objective without the tokens of `chosen` bool [T], which get no gradient: Clip-Cov (arXiv:2505.22617)."""
    figures = {**objective.figures, "high_covariance": chosen}
    return evolve(objective, loss=objective.loss * ~chosen, figures=figures)


def clipped_weight_objective(
    current: Tensor, log_ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> Objective:
    """-A stopgrad(clamp(ρ, 1 - clip_low, 1 + clip_high)) current, ρ = exp(log_ratio); all arguments float32 [T].

    CISPO (MiniMax-M1, arXiv:2506.13585): the bound is one of the weight, so every token has a gradient.
    """
    ratio = ratio_of(log_ratio.detach())
    low, high = ratio < 1.0 - clip_low, ratio > 1.0 + clip_high
    figures = {"clip_fraction": low | high, "clip_fraction_low": low, "clip_fraction_high": high}
    return Objective(loss=-advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * current, ratio=ratio, figures=figures)


def geometric_mean_objective(
    log_ratio: Tensor, advantages: Tensor, sequences: Sequences, *, clip_low: float, clip_high: float
) -> Objective:
    """-A exp(mean of the sequence's clipped log ρ), log ρ = `log_ratio` of the tokens; the tensors are float32 [T].

    GMPO (arXiv:2507.20673): log ρ is clipped at log(1 + clip_high) from above where A > 0, at log(1 - clip_low)
    from below where A < 0, token by token, before the geometric mean is taken.
    """
    log_low = math.log1p(-clip_low) if clip_low < 1 else -math.inf
    bounded = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    bounded = torch.where(advantages < 0, bounded.clamp(min=log_low), bounded.clamp(max=math.log1p(clip_high)))
    ratio = ratio_of(log_ratio.detach())
    figures = _clipped(ratio, advantages, clip_low=clip_low, clip_high=clip_high)
    return Objective(loss=-advantages * sequences.spread(sequences.mean(bounded).exp()), ratio=ratio, figures=figures)


def _clipped(ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float) -> dict[str, Tensor]:
    """Where a bound of the ratio [T] leaves a token without a gradient."""
    low, high = (advantages < 0) & (ratio < 1.0 - clip_low), (advantages > 0) & (ratio > 1.0 + clip_high)
    return {"clip_fraction": low | high, "clip_fraction_low": low, "clip_fraction_high": high}
