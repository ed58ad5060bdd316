"""The clipped policy-gradient objective, per token."""

import torch
from attrs import frozen
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""exp of it is finite in float32 and far outside any clip range: beyond it the ratio has no gradient, instead of a NaN."""


@frozen(kw_only=True, eq=False)
class ClippedObjective:
    """All float32 [T], and the flags bool [T]."""

    loss: Tensor
    """Differentiable, to be minimised."""
    ratio: Tensor
    """exp(current - previous), detached."""
    clipped_low: Tensor
    """Where the lower bound of the ratio binds: its gradient is 0."""
    clipped_high: Tensor
    """Where the upper bound of the ratio binds."""
    dual_clipped: Tensor
    """Where the bound on the loss of negative advantages binds."""


def clipped_objective(
    current: Tensor, previous: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None
) -> ClippedObjective:
    """max(-A ρ, -A clamp(ρ, 1 - clip_low, 1 + clip_high)), ρ = exp(current - previous); all arguments float32 [T].

    PPO (arXiv:1707.06347, equation 7) with DAPO's two bounds (arXiv:2503.14476, equation 10) and, where A < 0, the dual
    clip min(·, -A c) (arXiv:1912.09729, equation 5).
    """
    ratio = torch.exp((current - previous).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high))
    negative = advantages < 0
    dual_clipped = torch.zeros_like(negative)
    if dual_clip is not None:
        bound = -advantages * dual_clip
        dual_clipped = negative & (loss.detach() > bound)
        loss = torch.where(dual_clipped, bound, loss)
    ratio = ratio.detach()
    return ClippedObjective(
        loss=loss,
        ratio=ratio,
        clipped_low=negative & (ratio < 1.0 - clip_low),
        clipped_high=(advantages > 0) & (ratio > 1.0 + clip_high),
        dual_clipped=dual_clipped,
    )
