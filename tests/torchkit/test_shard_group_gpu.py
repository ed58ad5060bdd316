"""Two engines' ranks that share, by NCCL."""

import pytest
import torch

from rlcore.spi import WorkerError
from rlcore_torchkit.refit.shard_group import ProcessShardGroup
from rlcore_torchkit.testing.ranks import launch

from .shard_threads import route_in, store  # type: ignore[import-not-found]

NUM_DEVICES = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NUM_DEVICES < 2, reason=f"needs 2 CUDA devices, found {NUM_DEVICES}"),
]
NUM_REFITS = 3
SLICES_BYTES = (16, 2**20 + 16, 2**24)


class At:
    """A store by its port, as another process knows it."""

    def __init__(self, port: int) -> None:
        self.port = port


def run_rank(rank: int, port: int) -> None:
    """What the other sends first and both share then, again and again; at last one is lost."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    group = ProcessShardGroup(route_in(At(port), timeout_s=20.0), rank, 2, device)
    for number in range(NUM_REFITS):
        group.agree(number, f"plan {number}", [(0, 1)])
        told, heard = torch.full((8,), float(rank), device=device), torch.empty(8, device=device)
        group.exchange([(1 - rank, told)], [(1 - rank, heard)])
        assert heard.tolist() == [1.0 - rank] * 8
        rooms = [torch.zeros(2 * num_bytes, dtype=torch.uint8, device=device) for num_bytes in SLICES_BYTES]
        for room in rooms:
            room.view(2, -1)[rank] = 10 * number + rank + 1
        group.share([((0, 1), room) for room in rooms])
        for room in rooms:
            assert bool((room.view(2, -1)[0] == 10 * number + 1).all())
            assert bool((room.view(2, -1)[1] == 10 * number + 2).all())
    if rank == 0:
        with pytest.raises(WorkerError, match="lost, or late"):
            group.share([((0, 1), torch.zeros(32, dtype=torch.uint8, device=device))])
    group.close()


def test_two_ranks_share_and_miss_each_other() -> None:
    at = store(60.0)
    launch(run_rank, (at.port,), 2, timeout_s=110)
