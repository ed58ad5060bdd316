"""Named tensors cut into buckets, each with its digests."""

from collections.abc import Iterable, Iterator

from torch import Tensor

from rlcore.spi.weights import NamedTensor, WeightBucket
from rlcore_torchkit.refit.digest import tensor_digests


def make_buckets(tensors: Iterable[tuple[str, Tensor]], max_bucket_bytes: int) -> Iterator[WeightBucket]:
    """Buckets of at most so many bytes, in the order given; a tensor that is larger travels alone.

    Reads `tensors` only as far as the bucket at hand needs, so at most one bucket and one tensor are alive at a time.
    """
    pending: list[tuple[str, Tensor]] = []
    num_bytes = 0
    for name, tensor in tensors:
        if pending and num_bytes + tensor.nbytes > max_bucket_bytes:
            yield _bucket(pending)
            pending, num_bytes = [], 0
        pending.append((name, tensor))
        num_bytes += tensor.nbytes
    if pending:
        yield _bucket(pending)


def _bucket(tensors: list[tuple[str, Tensor]]) -> WeightBucket:
    digests = tensor_digests(tensor for _, tensor in tensors)
    named = zip(tensors, digests, strict=True)
    return WeightBucket(tensors=tuple(NamedTensor(name=name, tensor=tensor, digest=digest) for (name, tensor), digest in named))
