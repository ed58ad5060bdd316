"""Tensors of a bucket one after another in a flat buffer, at offsets that both sides work out from shapes and dtypes."""

from collections.abc import Iterator, Sequence
from math import prod

import torch
from torch import Tensor

from rlcore.spi import TensorSpec

ALIGNMENT = 256
"""Bytes; every dtype's own, and what copies on a GPU like best."""


def num_bytes(spec: TensorSpec) -> int:
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return prod(spec.shape) * dtype.itemsize


def packed_bytes(sizes: Sequence[int]) -> int:
    """Bytes of a buffer that holds tensors of these sizes."""
    return sum(_aligned(size) for size in sizes)


def pack(tensors: Sequence[Tensor], buffer: Tensor) -> None:
    """Copy `tensors` into `buffer`, uint8 on any device."""
    slices = [
        part.view(tensor.dtype).view(tensor.shape)
        for part, tensor in zip(_slices(buffer, [tensor.nbytes for tensor in tensors]), tensors, strict=True)
    ]
    if slices:
        torch._foreach_copy_(slices, list(tensors))


def unpack(buffer: Tensor, specs: Sequence[TensorSpec]) -> list[Tensor]:
    """Views of `buffer` as the tensors that were packed."""
    slices = _slices(buffer, [num_bytes(spec) for spec in specs])
    return [part.view(getattr(torch, spec.dtype)).view(spec.shape) for part, spec in zip(slices, specs, strict=True)]


def _slices(buffer: Tensor, sizes: Sequence[int]) -> Iterator[Tensor]:
    start = 0
    for size in sizes:
        yield buffer[start : start + size]
        start += _aligned(size)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
