"""Float32 masters of bfloat16 weights, of which only the lower 16 bits are kept: the upper ones are the weights themselves."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

MASTER = "master_param"
"""The name of the masters in the optimizers' state: float32 [n], or int16 [n] of what `divided` takes off."""

FACTOR = "gradient_factor"
"""The name of an attribute of what an optimizer updates: the number that clipping scales its gradient by, if not in place."""


def joined(weights: Tensor, remainders: Tensor) -> Tensor:
    """float32 [n], from bfloat16 [n] and the int16 [n] that TransformerEngine keeps with `store_param_remainders`: the lower
    halves of the bits. Where these are negative, which is half of an upper one's last place or more, it was rounded up."""
    upper = weights.view(torch.int16) - (remainders < 0).to(torch.int16)
    return torch.stack((remainders, upper), dim=-1).view(torch.float32).squeeze(-1)  # the lower half comes first


def divided(masters: Tensor) -> tuple[Tensor, Tensor]:
    """Undo `joined`: return the parts of a joined tensor. What is no number stays so."""
    remainders, upper = masters.unsqueeze(-1).view(torch.int16).unbind(-1)
    is_last = upper & 0x7FFF == 0x7FFF  # of the upper halves: a NaN, which one more would make a zero
    return (upper + ((remainders < 0) & ~is_last)).view(torch.bfloat16), remainders


@frozen(kw_only=True, eq=False)
class Span:
    """Elements `first` to `beyond` - 1 of what an optimizer updates."""

    key: Tensor
    """[n]: float32, or bfloat16 weights beside their remainders."""
    state: dict[str, Tensor]
    first: int
    beyond: int

    @property
    def gradients(self) -> Tensor:
        """float32 [beyond - first], clipped: a view where Megatron keeps it so."""
        found: Any = getattr(self.key, "decoupled_grad", None)
        kept: Tensor | None = self.key.grad if found is None else found
        assert kept is not None
        gradients, factor = kept[self.first : self.beyond].float(), getattr(self.key, FACTOR, None)
        return gradients if factor is None else gradients * factor

    @contextmanager
    def masters(self) -> Iterator[Tensor]:
        """float32 [beyond - first], to be updated in place."""
        weights = self.key.detach()[self.first : self.beyond]
        if weights.dtype == torch.float32:
            yield weights
            return
        remainders = self.state[MASTER][self.first : self.beyond]
        masters = joined(weights, remainders)
        yield masters
        for kept, part in zip((weights, remainders), divided(masters), strict=True):
            kept.copy_(part)
