"""Objectives that weigh a ratio down the farther it is from 1, instead of bounding it: SAPO's and VESPO's."""

import torch
from torch import Tensor

from rlcore_torchkit.rl.objective import Objective
from rlcore_torchkit.rl.ratio import MAX_LOG_RATIO, ratio_of
from rlcore_torchkit.rl.sequences import Sequences

MIN_LOG_WEIGHT = -18.420680743952367
"""log 1e-8: less than that a sequence, or a token of it, never weighs in VESPO's kernel."""


def gated_objective(log_ratio: Tensor, advantages: Tensor, *, positive: float, negative: float) -> Objective:
    """-A · 4/τ · sigmoid(τ (ρ - 1)), ρ = exp(log_ratio), τ = `positive` where A > 0, else `negative`; tensors float32 [T].

    SAPO (arXiv:2511.20347). The metric `gate_mean` is 4 p (1 - p), p that sigmoid: the share of its
    gradient that a token keeps, 1 where ρ = 1.
    """
    ratio = ratio_of(log_ratio)
    temperature = torch.where(advantages > 0, positive, negative).to(ratio.dtype)
    gate = torch.sigmoid(temperature * (ratio - 1.0))
    kept = gate.detach()
    return Objective(
        loss=-advantages * gate * 4.0 / temperature, ratio=ratio.detach(), figures={"gate_mean": 4.0 * kept * (1.0 - kept)}
    )


def kernel_objective(
    current: Tensor,
    log_ratio: Tensor,
    advantages: Tensor,
    importance: Tensor | None,
    sequences: Sequences,
    *,
    positive: tuple[float, float],
    negative: tuple[float, float],
) -> Objective:
    """-A stopgrad(w^k exp(λ (1 - w))) current, (k, λ) = `positive` where A >= 0, else `negative`; tensors float32 [T].

    VESPO (arXiv:2602.10693): w is the importance weight of the whole sequence, the product over its loss tokens of
    exp(log_ratio) and, where it is given, `importance`, the bounded ratio of the previous policy to the generator. The
    logarithm of a factor and of w stays within [log 1e-8, 20]. The kernel is 1 at w = 1 and its mean the metric `kernel_mean`.
    """
    log_weight = sequences.sum(log_ratio.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    if importance is not None:
        log_weight = log_weight + sequences.sum(importance.log().clamp(MIN_LOG_WEIGHT, MAX_LOG_RATIO))
    log_weight = sequences.spread(log_weight.clamp(MIN_LOG_WEIGHT, MAX_LOG_RATIO))
    rising = advantages >= 0
    power = torch.where(rising, positive[0], negative[0])
    decay = torch.where(rising, positive[1], negative[1])
    kernel = torch.exp(power * log_weight + decay * (1.0 - log_weight.exp()))
    return Objective(loss=-advantages * kernel * current, ratio=ratio_of(log_ratio.detach()), figures={"kernel_mean": kernel})
