"""Tensors of a bucket one after another in a flat buffer, at offsets that both sides work out from shapes and dtypes."""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from rlcore.spi import TensorSpec

ALIGNMENT = 256
"""Bytes; every dtype's own, and what copies on a GPU like best."""


def num_bytes(spec: TensorSpec) -> int:
    """Return the bytes of a tensor."""
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return prod(spec.shape) * dtype.itemsize


def packed_bytes(sizes: Sequence[int]) -> int:
    """Bytes of a buffer that holds tensors of these sizes."""
    return sum(_aligned(size) for size in sizes)


def pack(tensors: Sequence[Tensor], buffer: Tensor) -> None:
    """Copy `tensors` into `buffer`, uint8 on any device."""
    places = _placement(buffer, [(tensor.dtype, tensor.shape) for tensor in tensors])
    if places:
        torch._foreach_copy_(places, list(tensors))


def unpack(buffer: Tensor, specs: Sequence[TensorSpec]) -> list[Tensor]:
    """Views of `buffer` as the tensors that were packed."""
    return _placement(buffer, [(getattr(torch, spec.dtype), spec.shape) for spec in specs])


def _placement(buffer: Tensor, forms: Iterable[tuple[torch.dtype, tuple[int, ...]]]) -> list[Tensor]:
    """A view of the buffer for a tensor of each dtype and shape, one after another."""
    layout = _layout(tuple(forms))
    # Of many small tensors the views are most of what the host does: each is made at once, from the buffer in its dtype.
    whole = {dtype: buffer.view(dtype) for dtype in {dtype for dtype, *_ in layout}}
    starts = {dtype: view.storage_offset() for dtype, view in whole.items()}
    return [whole[dtype].as_strided(shape, strides, starts[dtype] + start) for dtype, shape, strides, start in layout]


@lru_cache(maxsize=1024)
def _layout(
    forms: tuple[tuple[torch.dtype, tuple[int, ...]], ...],
) -> tuple[tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int], ...]:
    """Dtype, shape, strides and first element of each tensor; kept, since buckets of many refits are alike."""
    layout, start = [], 0
    for dtype, shape in forms:
        strides, count = _contiguous(shape)
        layout.append((dtype, tuple(shape), strides, start // dtype.itemsize))
        start += _aligned(count * dtype.itemsize)
    return tuple(layout)


@lru_cache(maxsize=64)
def _contiguous(shape: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """The strides of a contiguous tensor, and its number of elements."""
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape))), prod(shape)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
