"""Distance of a critic's values from the returns, token by token."""

import torch
from attrs import frozen
from torch import Tensor


@frozen(kw_only=True, eq=False)
class ValueLoss:
    """[T] each."""

    loss: Tensor
    """Differentiable, to be minimised."""
    clipped: Tensor
    """bool: whether the clipped term is the greater one, which has no gradient where a value has moved out of its range."""


def clipped_value_loss(values: Tensor, previous: Tensor, returns: Tensor, *, clip: float) -> ValueLoss:
    """½ max((V - R)², (clamp(V, V_old - clip, V_old + clip) - R)²), all float32 [T]; infinite `clip` is no bound.

    The critic's part of PPO (arXiv:1707.06347, equation 9) with the clipping of its code (arXiv:2005.12729, section 3).
    """
    error = (values - returns).square()
    bounded = (values.clamp(previous - clip, previous + clip) - returns).square()
    return ValueLoss(loss=torch.maximum(error, bounded) / 2, clipped=(bounded > error).detach())
