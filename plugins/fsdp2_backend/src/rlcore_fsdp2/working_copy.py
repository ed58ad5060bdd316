"""Mixed precision on a single rank: a narrow copy of the model computes, beside the float32 master weights.

FSDP2 makes such a copy by gathering and casting every layer for every microbatch. One rank has nothing to gather, so it casts
once a step, and adds each narrow gradient to the master's in float32 as the backward pass produces it.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


class WorkingCopy:
    """Keeps `model`, of the same architecture as `master` and in a narrower dtype, equal to its rounded weights."""

    def __init__(self, master: nn.Module, model: Any) -> None:
        self.model = model
        masters = dict(master.named_parameters())
        self._masters = [masters[name] for name, _ in model.named_parameters()]
        self._narrow = list(model.parameters())
        for narrow, wide in zip(self._narrow, self._masters, strict=True):
            if narrow.requires_grad:
                narrow.register_post_accumulate_grad_hook(partial(_sync_weights, wide))
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over the master weights, which have changed."""
        torch._foreach_copy_(self._narrow, self._masters)


def _sync_weights(wide: Tensor, narrow: Tensor) -> None:
    """Add a finished gradient to the master's and free it."""
    gradient = narrow.grad
    assert gradient is not None
    if wide.grad is None:
        wide.grad = gradient.to(wide.dtype)
    else:
        wide.grad += gradient
    narrow.grad = None
