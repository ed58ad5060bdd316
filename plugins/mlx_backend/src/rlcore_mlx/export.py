"""Weights on their way out: cut into buckets, with the digests of what they hold."""

from collections.abc import Iterator

import mlx.core as mx

from rlcore.spi import NamedTensor, WeightBucket
from rlcore_mlx.decoder import Weights

CHUNK_WORDS = 2**22
"""Words are widened to int64 so many at a time."""


def make_buckets(weights: Weights, dtype: str, max_bucket_bytes: int) -> Iterator[WeightBucket]:
    """Buckets of at most so many bytes, in the weights' order; a tensor that is larger travels alone."""
    pending: list[NamedTensor] = []
    num_bytes = 0
    for name, weight in weights.items():
        tensor = weight.astype(getattr(mx, dtype))
        if pending and num_bytes + tensor.nbytes > max_bucket_bytes:
            yield WeightBucket(tensors=tuple(pending))
            pending, num_bytes = [], 0
        pending.append(NamedTensor(name=name, tensor=tensor, digest=digest_of(tensor)))
        num_bytes += tensor.nbytes
    if pending:
        yield WeightBucket(tensors=tuple(pending))


def digest_of(tensor: mx.array) -> int:
    """Equal to `rlcore.spi.tensor_digest` of the same bytes."""
    raw = mx.contiguous(tensor).reshape(-1).view(mx.uint8)
    words = mx.pad(raw, (0, -raw.size % 4)).view(mx.int32)
    total = 0
    for start in range(0, words.size, CHUNK_WORDS):
        chunk = words[start : start + CHUNK_WORDS].astype(mx.int64)
        factors = mx.arange(start, start + chunk.size, dtype=mx.int64) * 2 + 1
        total += int((chunk * factors).sum().item())
    return total % 2**64
