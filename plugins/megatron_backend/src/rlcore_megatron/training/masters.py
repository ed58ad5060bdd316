"""Float32 masters of bfloat16 weights, of which only the lower 16 bits are kept: the upper ones are the weights themselves."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from rlcore_torchkit.optimizer.one_pass import divided, joined

MASTER = "master_param"
"""The name of the masters in the optimizers' state: float32 [n], or int16 [n] of their remainders."""

FACTOR = "gradient_factor"
"""The name of an attribute of what an optimizer updates: the number that clipping scales its gradient by, if not in place."""


@frozen(kw_only=True, eq=False)
class Span:
    """Elements `first` to `beyond` - 1 of what an optimizer updates."""

    key: Tensor
    """[n]: float32, or bfloat16 weights beside their remainders."""
    state: dict[str, Tensor]
    first: int
    beyond: int

    @property
    def factor(self) -> float:
        """The number that clipping scales `kept_gradients` by."""
        found: float | None = getattr(self.key, FACTOR, None)
        return 1.0 if found is None else found

    @property
    def kept_gradients(self) -> Tensor:
        """[beyond - first]: a view, in the dtype that Megatron reduces in."""
        found: Any = getattr(self.key, "decoupled_grad", None)
        kept: Tensor | None = self.key.grad if found is None else found
        assert kept is not None
        return kept[self.first : self.beyond]

    @property
    def gradients(self) -> Tensor:
        """float32 [beyond - first], clipped: a view where Megatron keeps it so."""
        gradients = self.kept_gradients.float()
        return gradients if self.factor == 1.0 else gradients * self.factor

    @property
    def weights(self) -> Tensor:
        """[beyond - first]: a view of the key."""
        return self.key.detach()[self.first : self.beyond]

    @property
    def remainders(self) -> Tensor | None:
        """int16 [beyond - first], a view; None of float32 weights."""
        return None if self.key.dtype == torch.float32 else self.state[MASTER][self.first : self.beyond]

    @contextmanager
    def masters(self) -> Iterator[Tensor]:
        """float32 [beyond - first], to be updated in place."""
        weights, remainders = self.weights, self.remainders
        if remainders is None:
            yield weights
            return
        masters = joined(weights, remainders)
        yield masters
        for kept, part in zip((weights, remainders), divided(masters), strict=True):
            kept.copy_(part)
