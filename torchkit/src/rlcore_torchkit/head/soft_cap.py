"""Logits that a model bounds (Gemma 2, arXiv:2408.00118, section 2): cap · tanh(logit / cap).

Shapes: C rows of a chunk, W columns of a part of the vocabulary.
"""

import torch
from torch import Tensor


def soft_capped(logits: Tensor, cap: float) -> Tensor:
    """[C, W] of the same, in float32, or float64 for float64."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).div(cap).tanh_().mul_(cap)


def cap_slopes(logits: Tensor, cap: float) -> Tensor:
    """The derivatives of `soft_capped` at what gave these capped logits [C, W]: 1 - (logit / cap)². They are 0 at tokens that
    truncated sampling left out, whose logits lie far below the cap."""
    return logits.div(cap).clamp_(min=-1.0).square_().neg_().add_(1.0)
