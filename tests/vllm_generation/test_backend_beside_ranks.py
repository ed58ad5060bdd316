"""An engine in the process of one of several ranks: what it makes of process groups concerns no other rank."""

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from rlcore_torchkit.testing.ranks import launch
from rlcore_vllm.engines.environment import alone

NUM_RANKS = 2


def summed(group: dist.ProcessGroup | None = None) -> float:
    value = torch.ones(1)
    dist.all_reduce(value, group=group)
    return value.item()


def start_alone(rank: int, folder: Path) -> None:
    """What vLLM does as it starts, on rank 1 alone, and again, as after a failure."""
    options = {"init_method": f"file://{folder}/rendezvous", "rank": rank, "world_size": NUM_RANKS}
    dist.init_process_group("gloo", **options, timeout=timedelta(seconds=300))
    for _ in range(2 * rank):
        with alone():
            assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
            groups = [dist.new_group([0], backend="gloo") for _ in range(2)]
            assert [(dist.get_rank(group), dist.get_world_size(group)) for group in groups] == [(0, 1)] * 2
            assert [summed(group) for group in groups] == [1.0] * 2
        for group in groups:
            dist.destroy_process_group(group)
    assert (dist.get_rank(), dist.get_world_size()) == (rank, NUM_RANKS)
    assert summed() == NUM_RANKS
    assert summed(dist.new_group([0, 1])) == NUM_RANKS  # used, so that none is closed while the other still connects
    dist.destroy_process_group()


def test_a_rank_starts_its_engine_without_the_others(tmp_path: Path) -> None:
    launch(start_alone, (tmp_path,), NUM_RANKS)


def test_nothing_is_replaced_where_there_is_one_rank() -> None:
    before = dist.get_rank, dist.get_world_size, dist.new_group
    with alone():
        assert (dist.get_rank, dist.get_world_size, dist.new_group) == before
