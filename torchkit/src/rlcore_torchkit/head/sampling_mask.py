"""Logits of the tokens that truncated sampling had kept; the others' are so low that their probability is 0.

Shapes: T tokens, R rows of logits, C rows of a chunk, W columns of a part of the vocabulary, M kept tokens.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from attrs import frozen
from torch import Tensor

from rlcore.spi.batch import SamplingMask
from rlcore_torchkit.head.onednn import linear

_FLOOR = -1e30
"""In place of -inf, which times a probability of 0 is no number. Divided by any temperature it stays finite and far below."""


@frozen(eq=False)
class KeptTokens:
    """The tokens that each of R rows of logits is normalised over, on the device."""

    tokens: Tensor
    """int32 [M]: ids, row after row."""
    lengths: Tensor
    """int64 [R]: how many each row has."""
    masked: Tensor
    """bool [R]: False where a row is normalised over the whole vocabulary."""

    @classmethod
    def of(cls, mask: SamplingMask, device: torch.device) -> "KeptTokens":
        """The rows of T tokens."""
        lengths = torch.tensor(mask.lengths, device=device)
        return cls(torch.tensor(mask.tokens, device=device), lengths, lengths > 0)

    def select(self, rows: Tensor) -> "KeptTokens":
        """Select these rows, int64 [R']. Waits for the device once."""
        lengths = self.lengths[rows]
        starts = (self.lengths.cumsum(0) - self.lengths)[rows] - (lengths.cumsum(0) - lengths)
        total = int(lengths.sum())
        places = torch.arange(total, device=rows.device) + starts.repeat_interleave(lengths, output_size=total)
        return KeptTokens(self.tokens[places], lengths, self.masked[rows])

    def part(self, first: int, width: int) -> "KeptTokens":
        """The tokens from `first` on alone, as a rank holds them, by their number there. Waits for the device."""
        places = self.tokens - first
        is_here = (places >= 0) & (places < width)
        rows = torch.arange(len(self.lengths), device=places.device).repeat_interleave(self.lengths, output_size=len(places))
        return KeptTokens(places[is_here], torch.bincount(rows[is_here], minlength=len(self.lengths)), self.masked)

    def split(self, chunk_rows: int) -> "Sequence[KeptTokens]":
        """So many rows at a time. Waits for the device once."""
        ends = self.lengths.cumsum(0)[chunk_rows - 1 :: chunk_rows].tolist()
        bounds = [0, *ends, len(self.tokens)]
        parts = zip(torch.split(self.lengths, chunk_rows), torch.split(self.masked, chunk_rows), strict=True)
        return [
            KeptTokens(self.tokens[bounds[number] : bounds[number + 1]], lengths, masked)
            for number, (lengths, masked) in enumerate(parts)
        ]

    def mask_(self, logits: Tensor) -> Tensor:
        """Overwrite logits [C, W] of tokens that were left out, of as many rows as these; returns them."""
        rows = torch.arange(len(logits), device=logits.device).repeat_interleave(self.lengths, output_size=len(self.tokens))
        columns = self.tokens.long()
        kept = logits[rows, columns]
        logits.masked_fill_(self.masked[:, None], max(_FLOOR, torch.finfo(logits.dtype).min))
        logits[rows, columns] = kept
        return logits


Product: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""[C, W] from states [C, H] and head [W, H]."""


def head_logits(
    states: Tensor, head: Tensor, kept: KeptTokens | None, cap: float | None = None, product: Product | None = None
) -> Tensor:
    """[C, W] from states [C, H] and head [W, H]: of the kept tokens alone, where there are any; bounded by a soft `cap`.
    `product` takes the place of the matrix product in the dtype of the states. No gradient goes through it."""
    logits = (product or linear)(states, head)
    if cap is not None:
        logits = soft_capped(logits, cap)
    return logits if kept is None else kept.mask_(logits)


def soft_capped(logits: Tensor, cap: float) -> Tensor:
    """[C, W] of the same, in float32, or float64 for float64."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).div(cap).tanh_().mul_(cap)


def cap_slopes(logits: Tensor, cap: float) -> Tensor:
    """The derivatives of `soft_capped` at what gave these capped logits [C, W]: 1 - (logit / cap)². They are 0 at tokens that
    truncated sampling left out, whose logits lie far below the cap."""
    return logits.div(cap).clamp_(min=-1.0).square_().neg_().add_(1.0)
