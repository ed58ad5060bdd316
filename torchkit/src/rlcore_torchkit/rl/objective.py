"""What is minimised, token by token, and what it says of itself."""

from collections.abc import Mapping

from attrs import field, frozen
from torch import Tensor

from rlcore_torchkit.rl.ratio import ratio_of


@frozen(kw_only=True, eq=False)
class Objective:
    """float32 [T] each, but for flags, which are bool [T]."""

    loss: Tensor
    """Differentiable, to be minimised."""
    ratio: Tensor
    """exp(current - previous) of the token or its sequence, detached."""
    figures: Mapping[str, Tensor] = field(factory=dict)
    """Detached values or flags whose means are metrics of these names."""


def policy_gradient(current: Tensor, advantages: Tensor, *, log_ratio: Tensor) -> Objective:
    """-A current (REINFORCE, Williams, 1992): no ratio and no bound. `log_ratio` is told as a metric alone. All float32 [T]."""
    return Objective(loss=-advantages * current, ratio=ratio_of(log_ratio.detach()))
