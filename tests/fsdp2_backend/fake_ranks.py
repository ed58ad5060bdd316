"""What one of several ranks holds, seen from this process alone: collectives return at once, with nothing from the others."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def on_rank(rank: int, num_ranks: int) -> Iterator[None]:
    """A default process group in which this is rank `rank` of `num_ranks`."""
    _clear_sharding_prop_cache()  # it holds the meshes of the rank before
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()
