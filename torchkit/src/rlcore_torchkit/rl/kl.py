"""Per-token estimators of the KL divergence of the policy from the reference."""

from typing import Literal

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
MAX_KL = 10.0


def kl_penalty(
    current: Tensor,
    reference: Tensor,
    *,
    estimator: Literal["k1", "k2", "k3"],
    gradient: Literal["expectation", "estimate"],
    sampled_by: Tensor | None = None,
) -> Tensor:
    """float32 [T]: k1 = -Δ, k2 = Δ²/2 or k3 = e^Δ - 1 - Δ, Δ = reference - current (Schulman, "Approximating KL Divergence").

    Δ is clamped to ±20 and the estimate to ±10. For "expectation" it is multiplied by exp(current - stopgrad(current)), which
    is 1 and adds k ∇current to the gradient: that of E[k] where the tokens are drawn from the policy. It comes after the
    clamp, so that the tokens farthest from the reference are still pulled back.

    Where they are drawn from another policy, `sampled_by` has its log-probabilities, and the estimate is weighed by
    exp(current - sampled_by), the exponent within ±20 (DeepSeek-V3.2, arXiv:2512.02556, "Unbiased KL Estimate"):
    differentiated for "expectation", a constant for "estimate".
    """
    delta = (reference - current).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    kl = _estimate(delta, estimator).clamp(-MAX_KL, MAX_KL)
    if sampled_by is not None:
        weight = torch.exp((current - sampled_by).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
        return kl * (weight if gradient == "expectation" else weight.detach())
    return kl * torch.exp(current - current.detach()) if gradient == "expectation" else kl


def _estimate(delta: Tensor, estimator: Literal["k1", "k2", "k3"]) -> Tensor:
    match estimator:
        case "k1":
            return -delta
        case "k2":
            return delta.square() / 2
        case "k3":
            return torch.expm1(delta) - delta
