"""`rlcore.spi.weights.tensor_digest` of many tensors on a CUDA device in one Triton kernel, which reads each byte once."""

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK_WORDS = 2**16
BLOCK_WORDS = 2**11


@triton.jit
def _digest_kernel(addresses, lengths, tensors, starts, sums, chunk_words: tl.constexpr, block_words: tl.constexpr):
    chunk = tl.program_id(0)
    tensor = tl.load(tensors + chunk)
    start = tl.load(starts + chunk)
    length = tl.load(lengths + tensor)
    words = tl.load(addresses + tensor).to(tl.pointer_type(tl.int32))
    total = tl.zeros((block_words,), tl.int64)
    for offset in range(0, chunk_words, block_words):
        places = start + offset + tl.arange(0, block_words)
        total += tl.load(words + places, mask=places < length, other=0).to(tl.int64) * (2 * places + 1)
    # Integers: the order in which chunks are added makes no difference.
    tl.atomic_add(sums + tensor, tl.sum(total, 0))


def digest_sums(tensors: Sequence[Tensor]) -> Tensor:
    """int64 [N] on their CUDA device: Σ w_i · (2i + 1) over each tensor's 32-bit words, wrapping around; nothing waits for the
    device. Tensors are contiguous, and begin and end with a word."""
    device, num_tensors = tensors[0].device, len(tensors)
    sums = torch.zeros(num_tensors, dtype=torch.int64, device=device)
    lengths = np.array([tensor.nbytes // 4 for tensor in tensors], np.int64)
    num_chunks = -(-lengths // CHUNK_WORDS)
    total_chunks = int(num_chunks.sum())
    if not total_chunks:
        return sums
    numbers = np.repeat(np.arange(num_tensors), num_chunks)
    starts = (np.arange(total_chunks) - np.repeat(np.cumsum(num_chunks) - num_chunks, num_chunks)) * CHUNK_WORDS
    addresses = np.array([tensor.data_ptr() for tensor in tensors], np.int64)
    table = torch.from_numpy(np.concatenate([addresses, lengths, numbers, starts]).astype(np.int64)).to(device)
    columns = table.split([num_tensors, num_tensors, total_chunks, total_chunks])
    with torch.cuda.device(device):
        _digest_kernel[(total_chunks,)](*columns, sums, CHUNK_WORDS, BLOCK_WORDS, num_warps=8)
    return sums
