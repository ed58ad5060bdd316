"""Ranks that meet, and what keeps them from it."""

from functools import partial

import pytest
import torch

from rlcore.spi import RefitError, WorkerError
from rlcore_torchkit.refit.shard_group import ProcessShardGroup

from .shard_threads import CPU, route_in, store, together  # type: ignore[import-not-found]


def test_ranks_exchange_what_they_have() -> None:
    at = store()
    groups = together(*(partial(ProcessShardGroup, route_in(at), rank, 2, CPU, "plan") for rank in (0, 1)))
    sent, taken = torch.arange(5.0), torch.zeros(5)
    together(lambda: groups[0].exchange([(1, sent)], []), lambda: groups[1].exchange([], [(0, taken)]))
    assert torch.equal(sent, taken)
    for group in groups:
        group.close()


@pytest.mark.parametrize(
    ("plan", "message"),
    [("other", "rank 1 planned other pieces than rank 0"), ("!w is missing", "no plan of shards on rank 1: w is missing")],
)
def test_all_ranks_refuse_where_one_has_another_plan_or_none(plan: str, message: str) -> None:
    at = store()
    plans = ("plan", plan)
    errors = together(*(partial(ProcessShardGroup, route_in(at), rank, 2, CPU, plans[rank]) for rank in (0, 1)))
    for error in errors:
        assert isinstance(error, RefitError)
        assert message in str(error)


def test_a_rank_that_does_not_come_is_an_error() -> None:
    at = store()
    with pytest.raises(WorkerError, match=r"127\.0\.0\.1:\d+ in 0\.1 s"):
        ProcessShardGroup(route_in(at, timeout_s=0.1), 0, 2, CPU, "plan")


def test_a_rank_that_is_lost_is_an_error() -> None:
    at = store()
    groups = together(*(partial(ProcessShardGroup, route_in(at), rank, 2, CPU, "plan") for rank in (0, 1)))
    groups.pop().close()
    with pytest.raises(WorkerError, match="lost, or late"):
        groups[0].exchange([], [(1, torch.zeros(1))])


def test_ranks_share_what_each_has_a_slice_of() -> None:
    """Those of one set, and of another that one of them is in too."""
    at, sharing = store(), [(0, 1, 2), (1, 2)]
    groups = together(*(partial(ProcessShardGroup, route_in(at), rank, 3, CPU, "plan", sharing) for rank in range(3)))
    rooms = [[(ranks, torch.zeros(4 * len(ranks))) for ranks in sharing if rank in ranks] for rank in range(3)]
    for rank, own in enumerate(rooms):
        for ranks, room in own:
            room[4 * ranks.index(rank) :][:4] = 10.0 * len(ranks) + rank
    together(*(partial(group.share, own) for group, own in zip(groups, rooms, strict=True)))
    for own in rooms:
        for ranks, room in own:
            assert room.view(-1, 4)[:, 0].tolist() == [10.0 * len(ranks) + rank for rank in ranks]
            assert torch.equal(room.view(-1, 4), room.view(-1, 4)[:, :1].expand(-1, 4))
    for group in groups:
        group.close()


def test_a_rank_that_is_lost_is_missed_by_those_who_share() -> None:
    at = store()
    groups = together(*(partial(ProcessShardGroup, route_in(at), rank, 2, CPU, "plan", [(0, 1)]) for rank in (0, 1)))
    groups.pop().close()
    with pytest.raises(WorkerError, match="lost, or late"):
        groups[0].share([((0, 1), torch.zeros(4))])
