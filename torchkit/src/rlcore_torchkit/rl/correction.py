"""Weights and masks for the difference between the generator's and the trainer's probabilities. None of them has a gradient.

`previous` is the trainer's log-probability at the start of the step, `generation` the generator's; float32 [T].
"""

from typing import Literal

import torch
from torch import Tensor

from rlcore_torchkit.rl.sequences import Sequences

MAX_SEQUENCE_LOG_RATIO = 50.0
"""exp of it is finite in float32 and above any bound that means something."""


def importance_ratio(previous: Tensor, generation: Tensor) -> Tensor:
    """float32 [T]: exp(previous - generation), without a gradient; 0 where that is not finite."""
    return torch.exp(previous - generation).detach().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def sequence_importance_ratio(previous: Tensor, generation: Tensor, sequences: Sequences) -> Tensor:
    """float32 [T]: exp(Σ (previous - generation)) over the loss tokens of each token's sequence, the sum at most 50."""
    total = sequences.sum((previous - generation).detach()).clamp(max=MAX_SEQUENCE_LOG_RATIO)
    return sequences.spread(total.exp().nan_to_num(nan=0.0))


def bounded(ratio: Tensor, bound: Literal["truncate", "mask"], *, minimum: float, maximum: float) -> Tensor:
    """float32 [T]: within [minimum, maximum] the ratio itself; outside it

    - "truncate": the nearest bound (truncated importance sampling: Ionides 2008, "Truncated Importance Sampling");
    - "mask": 0 (IcePop, in Ring-1T's report, arXiv:2510.18855).
    """
    if bound == "truncate":
        return ratio.clamp(minimum, maximum)
    return torch.where((ratio >= minimum) & (ratio <= maximum), ratio, 0.0)


def within_geometric_mean(
    previous: Tensor, generation: Tensor, sequences: Sequences, *, minimum: float, maximum: float
) -> Tensor:
    """bool [T]: whether exp(mean of previous - generation) over the sequence's loss tokens is within the bounds."""
    ratio = sequences.mean((previous - generation).detach()).exp()
    return sequences.spread((ratio >= minimum) & (ratio <= maximum))


def on_policy(current: Tensor, generation: Tensor, advantages: Tensor, sequences: Sequences, *, maximum: float) -> Tensor:
    """bool [T]: False where A < 0 and the mean of generation - current over the sequence's loss tokens, in nats, is above
    `maximum` (off-policy sequence masking, DeepSeek-V3.2, arXiv:2512.02556, equation 9)."""
    divergence = sequences.spread(sequences.mean(generation - current.detach()))
    return (advantages >= 0) | (divergence <= maximum)
