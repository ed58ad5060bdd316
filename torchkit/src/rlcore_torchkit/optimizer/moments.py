"""AdamW's moments in 8 bits (arXiv:2110.02861): codes of torchao's dynamic maps, with one scale for a block of a row.

A row is the last dimension of a tensor, and block k of it its elements 256 k to 256 k + 255, the last one shorter: the same
blocks wherever a tensor is cut. Where rows are whole multiples of 256, they are those of torchao.optim.AdamW8bit.
Shapes: R rows, C columns of a part that begins at column F of W, K = ⌈W / 256⌉ blocks of a row.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from math import prod
from typing import Any

import numpy as np
import torch
from attrs import frozen
from torch import Tensor
from torch.nn import functional as F

from rlcore_torchkit.optimizer import settings
from rlcore_torchkit.optimizer.settings import BLOCK

LEAST_SCALE = 1e-12
"""The least scale that values are divided by, as torchao's."""


@frozen(kw_only=True)
class Columns:
    """The columns that a rank holds of every row of a tensor."""

    first: int
    stop: int
    width: int
    """W, the columns of the whole tensor."""

    @property
    def num_blocks(self) -> int:
        """K, the blocks of a whole row."""
        return -(-self.width // BLOCK)

    @property
    def blocks(self) -> slice:
        """The blocks that these columns lie in."""
        return slice(self.first // BLOCK, -(-self.stop // BLOCK))

    def scales(self, values: Tensor) -> Tensor:
        """float32 [..., K]: the largest absolute value of each block in values [..., C]; 0.0 of blocks with none of them.

        Of ranks with other columns of the same rows the largest counts (an all-reduce by MAX).
        """
        start = self.first - self.blocks.start * BLOCK
        padded = F.pad(values.abs(), (start, -(start + values.shape[-1]) % BLOCK))
        scales = values.new_zeros((*values.shape[:-1], self.num_blocks))
        scales[..., self.blocks] = padded.view(*padded.shape[:-1], padded.shape[-1] // BLOCK, BLOCK).amax(-1)
        return scales

    def spread(self, scales: Tensor) -> Tensor:
        """float32 [..., C]: each element's scale, of scales [..., K]."""
        first = self.blocks.start * BLOCK
        each = scales[..., self.blocks].repeat_interleave(BLOCK, dim=-1)
        return each[..., self.first - first : self.stop - first]


def row_parts(shape: Sequence[int]) -> Iterator[tuple[Any, ...]]:
    """Yield indices of consecutive parts of a tensor [..., C], each of whole rows and at most DECODED_ELEMENTS elements.

    A longer row is a part by itself. An index is a slice of the first dimension, or behind numbers one of a later dimension.
    """
    each = prod(shape[1:])
    if each > settings.DECODED_ELEMENTS and len(shape) > 2:
        for index in range(shape[0]):
            yield from ((index, *inner) for inner in row_parts(shape[1:]))
        return
    most = max(1, settings.DECODED_ELEMENTS // each)
    for first in range(0, shape[0], most):
        yield (slice(first, min(first + most, shape[0])),)


def encode(values: Tensor, scales: Tensor, columns: Columns, *, signed: bool) -> Tensor:
    """uint8 [..., C]: codes of values [..., C] with scales [..., K]; `signed` for the first moment."""
    shares = values / columns.spread(scales).clip(LEAST_SCALE)
    return torch.bucketize(shares, first_shares(signed, values.device), right=True, out_int32=True).to(torch.uint8)


def decode(codes: Tensor, scales: Tensor, columns: Columns, *, signed: bool) -> Tensor:
    """float32 [..., C] of codes [..., C]."""
    return code_values(signed, codes.device)[codes.int()] * columns.spread(scales)


@cache
def first_shares(signed: bool, device: torch.device) -> Tensor:
    """float32 [255]: the least share that each code but the first is given to, by torchao's rounding in float32.

    torchao searches in 25 passes over the values (`quantize_8bit_with_qmap`), where one comparison with these gives its codes.
    """
    below, above = (part.numpy(force=True) for part in code_values(signed, device).unfold(0, 2, 1).unbind(-1))
    half = (above - below) * np.float32(0.5)
    found = below + half
    while (is_late := np.nextafter(found, -np.inf, dtype=np.float32) - below >= half).any():
        found = np.where(is_late, np.nextafter(found, -np.inf, dtype=np.float32), found)
    while (is_early := found - below < half).any():
        found = np.where(is_early, np.nextafter(found, np.inf, dtype=np.float32), found)
    return torch.from_numpy(found).to(device)


@cache
def code_values(signed: bool, device: torch.device) -> Tensor:
    """float32 [256]: the share of the scale that each code stands for, ascending."""
    from torchao.optim.quant_utils import create_dynamic_map

    return torch.tensor(create_dynamic_map(signed=signed), dtype=torch.float32, device=device)
