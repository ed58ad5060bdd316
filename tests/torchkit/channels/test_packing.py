"""Tensors of any shapes and dtypes in one buffer."""

import pytest
import torch
from channel_support import assert_same, specs_of
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore_torchkit.channels.packing import ALIGNMENT, pack, packed_bytes, unpack


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3), max_size=8),
    dtypes=st.lists(st.sampled_from(["float32", "bfloat16", "float16"]), min_size=8, max_size=8),
)
def test_what_is_packed_is_unpacked(shapes, dtypes):
    tensors = [torch.randn(shape).to(getattr(torch, dtype)) for shape, dtype in zip(shapes, dtypes, strict=False)]
    buffer = torch.full((packed_bytes([tensor.nbytes for tensor in tensors]) + ALIGNMENT,), 255, dtype=torch.uint8)
    pack(tensors, buffer)
    assert_same(unpack(buffer, specs_of(tensors)), tensors)
    assert bool((buffer[-ALIGNMENT:] == 255).all())


def test_tensors_alike_are_found_in_each_of_several_buffers():
    places = [torch.zeros(8 * ALIGNMENT, dtype=torch.uint8)[start * ALIGNMENT :] for start in (0, 2, 1)]
    all_tensors = [[torch.randn(3, 5), torch.randn(7).bfloat16(), torch.randn(2, 4)] for _ in places]
    for tensors, buffer in zip(all_tensors, places, strict=True):
        pack(tensors, buffer)
    for tensors, buffer in zip(all_tensors, places, strict=True):
        assert_same(unpack(buffer, specs_of(tensors)), tensors)


@pytest.mark.parametrize(
    "others",
    [
        [torch.randn(5, 3), torch.randn(7).bfloat16()],
        [torch.randn(3, 5).bfloat16(), torch.randn(7).bfloat16()],
        [torch.randn(7).bfloat16(), torch.randn(3, 5)],
        [torch.randn(300, 5), torch.randn(7).bfloat16()],
    ],
    ids=["turned", "dtype", "order", "size"],
)
def test_tensors_unlike_those_before_lie_elsewhere(others):
    buffer = torch.zeros(40 * ALIGNMENT, dtype=torch.uint8)
    for tensors in ([torch.randn(3, 5), torch.randn(7).bfloat16()], others):
        pack(tensors, buffer)
        assert_same(unpack(buffer, specs_of(tensors)), tensors)


def test_a_part_of_a_larger_buffer():
    tensors = [torch.randn(3, 5), torch.randn(7).bfloat16()]
    whole = torch.zeros(packed_bytes([tensor.nbytes for tensor in tensors]) + ALIGNMENT, dtype=torch.uint8)
    pack(tensors, whole[ALIGNMENT:])
    assert_same(unpack(whole[ALIGNMENT:], specs_of(tensors)), tensors)
    assert not whole[:ALIGNMENT].any()
