"""How much likelier the policy has become than it was, of a token or of its whole sequence."""

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from rlcore_torchkit.rl.sequences import Sequences

RatioLevel: TypeAlias = Literal["token", "sequence", "sequence_token", "sequence_product"]

MAX_LOG_RATIO = 20.0
"""exp of it is finite in float32 and far outside any clip range: beyond it the ratio has no gradient, instead of a NaN."""


def log_ratio(level: RatioLevel, current: Tensor, previous: Tensor, sequences: Sequences) -> Tensor:
    """float32 [T], differentiable, of `current` and `previous` log-probabilities [T]; with δ = current - previous it is

    - "token": δ (PPO, arXiv:1707.06347);
    - "sequence": the mean of δ over the sequence's loss tokens (GSPO, arXiv:2507.18071);
    - "sequence_token": the same value, its gradient that of the token's own log-probability (GSPO-token, the same paper);
    - "sequence_product": the sum of δ, whose exp is the ratio of the whole sequences (RLOO, arXiv:2402.14740).
    """
    delta = current - previous
    match level:
        case "token":
            return delta
        case "sequence":
            return sequences.spread(sequences.mean(delta))
        case "sequence_token":
            return sequences.spread(sequences.mean(delta)).detach() + (current - current.detach())
        case "sequence_product":
            return sequences.spread(sequences.sum(delta))


def ratio_of(log_ratio: Tensor) -> Tensor:
    """exp of it, the exponent within ±20."""
    return torch.exp(log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
