"""Ranks that meet, and what keeps them from it."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlcore.spi import RefitError, WorkerError
from rlcore_torchkit.refit.shard_group import ProcessShardGroup

from .shard_threads import group_in, route_in, store, together  # type: ignore[import-not-found]


def groups_in(at: Any, world_size: int, sharing: Sequence[tuple[int, ...]] = ()) -> list[ProcessShardGroup]:
    """The group of each rank, which has agreed on a first plan."""
    groups = [group_in(route_in(at), rank, world_size) for rank in range(world_size)]
    together(*(partial(group.agree, 1, "plan", sharing) for group in groups))
    return groups


def test_ranks_exchange_what_they_have() -> None:
    at = store()
    groups = groups_in(at, 2)
    sent, taken = torch.arange(5.0), torch.zeros(5)
    together(lambda: groups[0].exchange([(1, sent)], []), lambda: groups[1].exchange([], [(0, taken)]))
    assert torch.equal(sent, taken)
    for group in groups:
        group.close()


@pytest.mark.parametrize("number", [1, 2], ids=["at first", "in a group that is kept"])
@pytest.mark.parametrize(
    ("plan", "message"),
    [("other", "rank 1 planned other pieces than rank 0"), ("!w is missing", "no plan of shards on rank 1: w is missing")],
)
def test_all_ranks_refuse_where_one_has_another_plan_or_none(plan: str, message: str, number: int) -> None:
    at = store()
    groups = groups_in(at, 2) if number > 1 else [group_in(route_in(at), rank, 2) for rank in (0, 1)]
    errors = together(*(partial(group.agree, number, own) for group, own in zip(groups, ("plan", plan), strict=True)))
    for error in errors:
        assert isinstance(error, RefitError)
        assert message in str(error)


def test_a_rank_that_does_not_come_is_an_error() -> None:
    at = store()
    with pytest.raises(WorkerError, match=r"127\.0\.0\.1:\d+ in 0\.1 s"):
        group_in(route_in(at, timeout_s=0.1), 0, 2).agree(1, "plan")


def test_a_rank_that_does_not_come_to_a_later_plan_is_an_error() -> None:
    at = store()
    groups = [group_in(route_in(at, timeout_s=2.0), rank, 2) for rank in (0, 1)]
    together(*(partial(group.agree, 1, "plan") for group in groups))
    with pytest.raises(WorkerError, match=r"127\.0\.0\.1:\d+ in 2 s"):
        groups[0].agree(2, "plan")
    for group in groups:
        group.close()


@pytest.mark.parametrize(
    ("plans", "expected"),
    [
        ([[], [], []], [3]),
        ([[(0, 1, 2)], [(0, 2)], [(0, 1, 2)]], [3, 3, 2]),
        ([[(1, 2)], [(0, 1, 2), (1, 2)], [(0, 1), (1, 2)]], [3, 3, 2, 2]),
    ],
)
def test_later_plans_connect_ranks_that_are_not_connected_yet(
    plans: list[list[tuple[int, ...]]], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Count the groups by their sizes. Each rank makes an end of its own."""
    made, make = list[int](), dist.ProcessGroupGloo

    def counted(at: Any, rank: int, size: int, timeout: Any) -> Any:
        made.append(size)
        return make(at, rank, size, timeout)

    monkeypatch.setattr(dist, "ProcessGroupGloo", counted)
    at = store()
    groups = [group_in(route_in(at), rank, 3) for rank in range(3)]
    for number, sharing in enumerate(plans):
        together(*(partial(group.agree, number, "plan", sharing) for group in groups))
    assert sorted(made) == sorted(size for size in expected for _ in range(size))
    for group in groups:
        group.close()


def test_a_rank_that_is_lost_is_an_error() -> None:
    at = store()
    groups = groups_in(at, 2)
    groups.pop().close()
    with pytest.raises(WorkerError, match="lost, or late"):
        groups[0].exchange([], [(1, torch.zeros(1))])


def test_ranks_share_what_each_has_a_slice_of() -> None:
    """Those of one set, and of another that one of them is in too."""
    at, sharing = store(), [(0, 1, 2), (1, 2)]
    groups = groups_in(at, 3, sharing)
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
    groups = groups_in(at, 2, [(0, 1)])
    groups.pop().close()
    with pytest.raises(WorkerError, match="lost, or late"):
        groups[0].share([((0, 1), torch.zeros(4))])
