"""The part of a tensor that each rank holds, and the one that it writes."""

import pytest
import torch
from fake_ranks import on_rank
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from rlcore.spi import ShardSlice
from rlcore_fsdp2.sharding import bounds_of, held_part, written_part

WHOLE = torch.arange(35.0).view(5, 7)


def test_a_whole_tensor_is_its_only_part():
    assert held_part("a", WHOLE) == written_part("a", WHOLE) == ShardSlice("a", (0, 0), (5, 7))


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
            part, own = held_part("a", tensor), written_part("a", tensor)
            assert torch.equal(WHOLE[bounds_of(part)], tensor.to_local())
            assert own == part or not own.size
            written[bounds_of(own)] += 1.0
    assert torch.equal(written, torch.ones(5, 7))
