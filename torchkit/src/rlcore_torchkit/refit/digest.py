"""`rlcore.spi.weights.tensor_digest` in torch, on whatever device the tensor is."""

from collections.abc import Iterable, Iterator
from functools import lru_cache

import torch
from torch import Tensor

from rlcore.spi.weights import NamedTensor, WeightBucket

_ROW_WORDS = 2**12
_CHUNK_ROWS = 2**7
"""Words are widened to int64 so many rows at a time: what fits a CPU's cache."""


def tensor_digest(tensor: Tensor) -> int:
    """Equal to `rlcore.spi.weights.tensor_digest` of the same bytes."""
    return tensor_digests([tensor])[0]


def tensor_digests(tensors: Iterable[Tensor]) -> list[int]:
    """The digest of each tensor; waits for each device once, after everything is queued."""
    digests: list[int] = []
    by_device: dict[torch.device, dict[int, Tensor]] = {}
    for index, tensor in enumerate(tensors):
        if tensor.is_cuda:
            # A view costs about as much of the host's time as all else here, so that what needs none gets none.
            whole = tensor if _is_whole_words(tensor) else _words(tensor)
            by_device.setdefault(tensor.device, {})[index] = whole
        digests.append(0 if tensor.is_cuda else int(_sum(_words(tensor))) % 2**64)
    if by_device:
        from rlcore_torchkit.refit.digest_kernels import digest_sums

        sums = [digest_sums(list(each.values())) for each in by_device.values()]
        for each, values in zip(by_device.values(), sums, strict=True):
            for index, value in zip(each, values.tolist(), strict=True):
                digests[index] = value % 2**64
    return digests


@lru_cache(maxsize=16)
def _factors(device: torch.device) -> Tensor:
    """int64 [row]: 1, 3, 5, …"""
    return torch.arange(_ROW_WORDS, device=device) * 2 + 1


def _is_whole_words(tensor: Tensor) -> bool:
    """Return whether the tensor's bytes, as they lie in memory, are words."""
    return tensor.is_contiguous() and tensor.nbytes % 4 == 0 and tensor.data_ptr() % 4 == 0


def _words(tensor: Tensor) -> Tensor:
    """int32 [words]: the tensor's bytes, zero-padded to whole words; a view where their place in memory allows."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if len(raw) % 4:
        raw = torch.nn.functional.pad(raw, (0, -len(raw) % 4))
    elif raw.storage_offset() % 4:
        raw = raw.clone()
    return raw.view(torch.int32)


def _sum(words: Tensor) -> Tensor:
    """int64 scalar. Row r of the words holds factors 2 (r * row + i) + 1 = (2i + 1) + 2 r * row."""
    factors = _factors(words.device)
    num_rows = len(words) // _ROW_WORDS
    whole, rest = words[: num_rows * _ROW_WORDS].view(num_rows, _ROW_WORDS), words[num_rows * _ROW_WORDS :]
    total = (rest * (factors[: len(rest)] + 2 * num_rows * _ROW_WORDS)).sum()
    for start in range(0, num_rows, _CHUNK_ROWS):
        chunk = whole[start : start + _CHUNK_ROWS]
        bases = torch.arange(start, start + len(chunk), device=chunk.device) * (2 * _ROW_WORDS)
        total += (chunk * factors).sum() + (chunk.sum(1) * bases).sum()
    return total


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
