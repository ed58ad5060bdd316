"""Sums and means over loss tokens: of a microbatch's sequences, which are always whole, and of the optimizer step.

Shapes: T tokens, N sequences. Nothing here waits for the device, and a sum of a sequence depends on its own tokens alone.
"""

from functools import cached_property

import torch
from attrs import frozen
from torch import Tensor

from rlcore.spi import GlobalCounts, LossInputs
from rlcore_torchkit.rl.episodes import EPISODE_TOKENS


def masked(values: Tensor, inputs: LossInputs) -> Tensor:
    """`values` [T] with 0 outside the loss mask, so that nothing there, not even a NaN, reaches value or gradient."""
    return torch.where(inputs.loss_mask, values, 0.0)


@frozen(eq=False)
class MaskedMean:
    """A microbatch's part of a mean over the loss tokens of the optimizer step: its sum divided by the global count."""

    loss_mask: Tensor
    counts: GlobalCounts

    def __call__(self, values: Tensor) -> Tensor:
        """Detached scalar of `values` [T], bool counting as 0 and 1."""
        return torch.where(self.loss_mask, values.detach().float(), 0.0).sum() / max(self.counts.num_loss_tokens, 1)


@frozen(eq=False)
class Sequences:
    """Groups loss tokens by sequence: `loss_mask` bool [T], `offsets` int64 [N+1]."""

    loss_mask: Tensor
    offsets: Tensor
    episode_tokens: Tensor | None = None
    """[N]: loss tokens of each sequence's episode (EPISODE_TOKENS); None where each sequence is one."""

    @classmethod
    def of(cls, inputs: LossInputs) -> "Sequences":
        """Return the sequences of a microbatch."""
        return cls(inputs.loss_mask, inputs.offsets, inputs.sequence_columns.get(EPISODE_TOKENS))

    @cached_property
    def of_token(self) -> Tensor:
        """int64 [T]: the number of each token's sequence."""
        lengths = self.offsets.diff()
        numbers = torch.arange(len(lengths), device=lengths.device)
        return numbers.repeat_interleave(lengths, output_size=len(self.loss_mask))

    @cached_property
    def num_tokens(self) -> Tensor:
        """int64 [N]: loss tokens of each sequence."""
        running = torch.nn.functional.pad(self.loss_mask.long().cumsum(0), (1, 0))
        return running[self.offsets].diff()

    def sum(self, values: Tensor) -> Tensor:
        """[N]: of `values` [T] over each sequence's loss tokens; 0 without one. Differentiable."""
        inside = torch.where(self.loss_mask, values, 0.0)
        return torch.segment_reduce(inside, "sum", offsets=self.offsets, initial=0.0, unsafe=True)

    def mean(self, values: Tensor) -> Tensor:
        """[N]: of `values` [T] over each sequence's loss tokens; 0 without one. Differentiable."""
        return self.sum(values) / self.num_tokens.clamp(min=1)

    def spread(self, values: Tensor) -> Tensor:
        """[T]: each sequence's value of `values` [N] at its tokens. Differentiable, in an order that is the same each time."""
        return values[self.of_token]
