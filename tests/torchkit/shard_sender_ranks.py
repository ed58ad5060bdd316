"""Two trainer ranks; beside the first, in a thread of its own, the rank of a generator."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlcore.spi import ContractError, RefitError, RlcoreError, ShardRoute, ShardSlice, TensorSpec, WorkerError
from rlcore_torchkit.distributed.process_group import keep_on_loopback
from rlcore_torchkit.refit.shard_group import ProcessShardGroup
from rlcore_torchkit.refit.shard_route import ShardEnd
from rlcore_torchkit.refit.shard_sender import ShardSender

from .shard_threads import CPU, MAX_BYTES, REQUEST, SPECS, WHOLE, end_of, route_in, store  # type: ignore[import-not-found]

LAYOUT = tuple(tuple(ShardSlice(spec.name, (3 * rank, 0), (3 * rank + 3, 4)) for spec in SPECS) for rank in (0, 1))


def run_rank(rank: int, address: str) -> None:
    keep_on_loopback()
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    full = {spec.name: torch.arange(24.0).view(6, 4) + number for number, spec in enumerate(SPECS)}
    taken: dict[str, Tensor] = {}

    def take(end: ShardEnd) -> None:
        end.take(lambda parts: taken.update({spec.name: tensor for spec, _, tensor in parts}))

    assert refit(rank, LAYOUT[rank], full, take) is None
    assert rank == 1 or all(torch.equal(taken[name], full[name]) for name in full)
    # Both hold all of it: the same, and something else.
    assert refit(rank, WHOLE, full, take) is None
    assert isinstance(refit(rank, WHOLE, {name: tensor + rank for name, tensor in full.items()}, take), ContractError)
    # The part of one rank is missing; a generator's rank is lost once all have met.
    assert isinstance(refit(rank, LAYOUT[rank][: 3 - rank], full, take), RefitError)
    assert isinstance(refit(rank, LAYOUT[rank], full, lambda end: end.group.close()), WorkerError | RefitError)
    dist.destroy_process_group()


def refit(
    rank: int, held: Sequence[ShardSlice], full: dict[str, Tensor], take: Callable[[ShardEnd], None]
) -> RlcoreError | None:
    """What the rank raises; it comes to an end on both."""

    def read(specs: Sequence[TensorSpec]) -> dict[ShardSlice, Tensor]:
        names = {spec.name for spec in specs}
        return {box: full[box.name][box.start[0] : box.stop[0]] for box in held if box.name in names}

    sender = ShardSender(rank, 2, CPU)
    export = sender.export(REQUEST, SPECS, held, read)
    assert export.shards is not None
    with ThreadPoolExecutor(1) as pool:
        receiver: Future[Any] | None = None
        if rank == 0:
            at = store()
            export.shards.route = route_in(at)
            receiver = pool.submit(receive, export.shards.held, export.shards.route, take)
        try:
            list(export.buckets)
        except RlcoreError as error:
            return error
        finally:
            if receiver is not None:
                receiver.exception()
            sender.close()
    return None


def receive(held: Sequence[Sequence[ShardSlice]], route: ShardRoute, take: Callable[[ShardEnd], None]) -> None:
    end = end_of(route, held)
    take(end)
    end.group.close()


def run_refits(rank: int, address: str) -> None:
    """Refits by one sender a rank: parts are told in the first, and again where one rank's are others."""
    keep_on_loopback()
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    sender, told = ShardSender(rank, 2, CPU), list[Any]()
    gather = dist.all_gather_object

    def noted(found: list[Any], own: Any) -> None:
        told.append(own)
        gather(found, own)

    dist.all_gather_object = noted
    at = store() if rank == 0 else None
    route = None if at is None else route_in(at)
    ends = list[ShardEnd]()
    for number in range(3):
        told.clear()
        full = {spec.name: torch.arange(24.0).view(6, 4) + number for spec in SPECS}
        send(sender, LAYOUT[rank], full, route, ends)
        assert any(map(tells_parts, told)) == (number == 0), f"refit {number}"
    # The second rank has a part less: the first, whose parts are the same, notices too.
    told.clear()
    export = sender.export(REQUEST, SPECS, LAYOUT[rank][: 3 - rank], lambda _: {})
    assert any(map(tells_parts, told))
    assert export.shards is not None
    assert export.shards.held == (LAYOUT[0], LAYOUT[1][:2])
    export.shards.route = route
    with ThreadPoolExecutor(1) as pool:
        planned = None if route is None else pool.submit(planned_anew, ends[0].group, export.shards.held, route)
        with pytest.raises(RefitError, match=r"rank 0 .* 24 .* of c, .* 12"):
            list(export.buckets)
        assert planned is None or isinstance(planned.exception(), RefitError)
    for end in ends:
        end.group.close()
    sender.close()
    dist.destroy_process_group()


def planned_anew(group: ProcessShardGroup, held: Sequence[Sequence[ShardSlice]], route: ShardRoute) -> ShardEnd:
    """The generator's end of the second plan."""
    return ShardEnd(specs=SPECS, held=held, wanted=route.wanted, group=group, number=2, max_bytes=MAX_BYTES)


def tells_parts(given: object) -> bool:
    """Whether boxes are among what a rank has told."""
    return "ShardSlice(" in repr(given)


def send(
    sender: ShardSender, held: Sequence[ShardSlice], full: dict[str, Tensor], route: ShardRoute | None, ends: list[ShardEnd]
) -> None:
    """One refit; `ends` gets the generator's end the first time, beside the rank that has the route."""

    def read(specs: Sequence[TensorSpec]) -> dict[ShardSlice, Tensor]:
        names = {spec.name for spec in specs}
        return {box: full[box.name][box.start[0] : box.stop[0]] for box in held if box.name in names}

    export, taken = sender.export(REQUEST, SPECS, held, read), dict[str, Tensor]()
    assert export.shards is not None
    export.shards.route, shards = route, export.shards

    def take() -> None:
        if not ends:
            assert route is not None
            ends.append(end_of(route, shards.held))
        ends[0].take(lambda parts: taken.update({spec.name: tensor for spec, _, tensor in parts}))

    with ThreadPoolExecutor(1) as pool:
        receiver = None if route is None else pool.submit(take)
        list(export.buckets)
        if receiver is not None:
            receiver.result(300)
            assert all(torch.equal(taken[name], full[name]) for name in full)
