"""Weights on their way out: cut into buckets, with the digests of what they hold."""

from collections.abc import Iterator

import mlx.core as mx
import numpy as np

from rlcore.spi import NamedTensor, WeightBucket, tensor_digest
from rlcore_mlx.decoder import Weights


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
    """The `tensor_digest` of the tensor's bytes, of which numpy sees a view: it has no bfloat16."""
    return tensor_digest(np.asarray(mx.contiguous(tensor).reshape(-1).view(mx.uint8)))
