"""The torch digest against the numpy definition, bit for bit, and buckets that carry it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlcore.spi import tensor_digest as numpy_digest
from rlcore_torchkit.refit.digest import tensor_digest, tensor_digests

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.int8, torch.bool]
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
    ),
]


def random_bytes(num_elements: int, dtype: torch.dtype, seed: int) -> Tensor:
    """A tensor of any bit pattern (of 0 and 1 for bool)."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(2 if dtype == torch.bool else 256, (num_elements * size,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype)


def expected_digest(tensor: Tensor) -> int:
    return numpy_digest(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_the_definition(dtype: torch.dtype, device: str) -> None:
    row, chunk = 2**14 // dtype.itemsize, 2**21 // dtype.itemsize  # elements of what is added up at a time
    for seed, num_elements in enumerate((0, 1, 3, 5, row, row + 1, 5 * row - 1, chunk, chunk + 3 * row + 3)):
        tensor = random_bytes(num_elements, dtype, seed).to(device)
        assert tensor_digest(tensor) == expected_digest(tensor), num_elements


@settings(max_examples=60, deadline=None)
@given(start=st.integers(0, 7), length=st.integers(0, 50), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 99))
def test_views_at_any_place_in_memory(start: int, length: int, dtype: torch.dtype, seed: int) -> None:
    tensor = random_bytes(60, dtype, seed)[start : start + length]
    assert tensor_digest(tensor) == expected_digest(tensor)


def test_shapes_and_layouts() -> None:
    matrix = torch.randn(7, 5)
    assert tensor_digest(matrix.T) == expected_digest(matrix.T.contiguous()) != tensor_digest(matrix)
    assert tensor_digest(torch.tensor(1.5)) == expected_digest(torch.tensor([1.5]))
    assert tensor_digest(torch.nn.Parameter(matrix)) == tensor_digest(matrix)


@settings(max_examples=60, deadline=None)
@given(place=st.integers(0, 9_999), bit=st.integers(0, 31))
def test_every_changed_bit_changes_it(place: int, bit: int) -> None:
    words = torch.arange(10_000, dtype=torch.int32)
    changed = words.clone()
    changed[place] ^= -(2**31) if bit == 31 else 2**bit
    assert tensor_digest(changed) != tensor_digest(words)


@pytest.mark.parametrize("device", DEVICES)
def test_many_tensors_at_once(device: str) -> None:
    tensors = [torch.randn(n).to(device) for n in (3, 0, 9000, 1, 2**17 + 5)]
    tensors += [random_bytes(2**18 + 3, torch.int8, 0).to(device), tensors[-1][1:], torch.zeros(0, device=device)]
    tensors += [
        torch.randn(9).bfloat16().to(device)[1:],
        torch.randn(8).bfloat16().to(device)[1:],
        torch.randn(7, 5).to(device).T,
    ]
    assert tensor_digests(tensors) == [expected_digest(tensor) for tensor in tensors]
    assert tensor_digests([]) == []
