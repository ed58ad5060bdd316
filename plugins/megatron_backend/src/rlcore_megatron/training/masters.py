"""Float32 masters of bfloat16 weights, of which only the lower 16 bits are kept: the upper ones are the weights themselves."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

MASTER = "master_param"
"""The name of the masters in the optimizers' state: float32 [n], or int16 [n] of what `divided` takes off."""


def joined(weights: Tensor, remainders: Tensor) -> Tensor:
    """float32 [n], from bfloat16 [n] and the int16 [n] that TransformerEngine keeps with `store_param_remainders`: the lower
    halves of the bits. Where these are negative, which is half of an upper one's last place or more, it was rounded up."""
    upper = weights.view(torch.int16) - (remainders < 0).to(torch.int16)
    return torch.stack((remainders, upper), dim=-1).view(torch.float32).squeeze(-1)  # the lower half comes first


def divided(masters: Tensor) -> tuple[Tensor, Tensor]:
    """Undo `joined`: return the parts of a joined tensor."""
    remainders, upper = masters.unsqueeze(-1).view(torch.int16).unbind(-1)
    return (upper + (remainders < 0)).view(torch.bfloat16), remainders


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
        """float32 [beyond - first]: a view where Megatron keeps it so."""
        found: Any = getattr(self.key, "decoupled_grad", None)
        gradients: Tensor | None = self.key.grad if found is None else found
        assert gradients is not None
        return gradients[self.first : self.beyond].float()

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
