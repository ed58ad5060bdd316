"""The block of a tensor that each rank holds, and where two blocks meet."""

import numpy as np
import pytest
import torch
from fake_ranks import on_rank
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from rlcore_fsdp2.sharding import LocalShard

WHOLE = torch.arange(35.0).view(5, 7)


def bounds(part):
    """What indexes the part in the whole tensor."""
    return tuple(slice(first, first + size) for first, size in zip(part.offset, part.shape, strict=True))


def test_overlap_of_parts():
    whole = LocalShard(global_shape=(4, 3), offset=(0, 0), shape=(4, 3))
    lower = LocalShard(global_shape=(4, 3), offset=(2, 1), shape=(2, 2))
    upper = LocalShard(global_shape=(4, 3), offset=(0, 0), shape=(2, 3))
    assert whole.overlap(lower) == ((slice(2, 4), slice(1, 3)), (slice(0, 2), slice(0, 2)))
    assert lower.overlap(upper) is None


blocks = st.tuples(*[st.tuples(st.integers(0, 4), st.integers(0, 4)) for _ in range(2)])


@given(one=blocks, other=blocks)
def test_what_overlaps_is_what_both_hold(one, other):
    parts = [
        LocalShard(global_shape=(8, 8), offset=tuple(first for first, _ in block), shape=tuple(size for _, size in block))
        for block in (one, other)
    ]
    whole = np.arange(64).reshape(8, 8)
    contents = [whole[bounds(part)] for part in parts]
    common = np.intersect1d(*contents)
    found = parts[0].overlap(parts[1])
    if found is None:
        assert not common.size
        return
    for content, where in zip(contents, found, strict=True):
        np.testing.assert_array_equal(content[where].ravel(), common)


def test_a_whole_tensor_is_its_only_part():
    part = LocalShard.of(WHOLE)
    assert part == LocalShard(global_shape=(5, 7), offset=(0, 0), shape=(5, 7))
    assert LocalShard.written(WHOLE) == part
    assert not part.is_empty


@pytest.mark.parametrize(
    "placements",
    [(Replicate(), Shard(0)), (Shard(0), Replicate()), (Shard(0), Shard(1)), (Shard(1), Shard(1)), (Replicate(), Replicate())],
    ids=str,
)
def test_ranks_write_every_element_once(placements):
    written = torch.zeros(5, 7)
    for rank in range(4):
        with on_rank(rank, 4):
            mesh = init_device_mesh("cpu", (2, 2))
            tensor = distribute_tensor(WHOLE, mesh, placements, src_data_rank=None)
            part, own = LocalShard.of(tensor), LocalShard.written(tensor)
            assert torch.equal(WHOLE[bounds(part)], tensor.to_local())
            assert own.is_empty or own == part
            written[bounds(own)] += 1.0
    assert torch.equal(written, torch.ones(5, 7))
