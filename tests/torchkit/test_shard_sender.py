"""Sharded exports of one rank to another, in threads, and of two in processes."""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from rlcore.spi import RefitError, ShardExport, ShardRoute, ShardSlice, TensorSpec, WeightExport
from rlcore_torchkit.refit.shard_receiver import ShardReceiver
from rlcore_torchkit.refit.shard_route import ShardEnd, whole_slice
from rlcore_torchkit.refit.shard_sender import ShardSender
from rlcore_torchkit.testing.ranks import free_address, launch

from .shard_sender_ranks import run_rank, run_refits  # type: ignore[import-not-found]
from .shard_threads import (  # type: ignore[import-not-found]
    CPU,
    MAX_BYTES,
    REQUEST,
    SPECS,
    WHOLE,
    end_of,
    group_in,
    route_in,
    store,
    together,
)


def export_of(sender: ShardSender, weights: Mapping[str, Tensor], held: Sequence[ShardSlice] = WHOLE) -> WeightExport:
    def read(specs: Sequence[TensorSpec]) -> dict[ShardSlice, Tensor]:
        names = {spec.name for spec in specs}
        return {box: weights[box.name] for box in held if box.name in names}

    return sender.export(REQUEST, SPECS, held, read)


def receiving(route: ShardRoute, held: Sequence[ShardSlice] = WHOLE) -> ShardEnd:
    return end_of(route, [held])  # type: ignore[no-any-return]


def weights_of(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {spec.name: torch.randn(spec.shape, generator=generator) for spec in SPECS}


def test_refits_go_by_one_route_again_and_again() -> None:
    at, sender = store(), ShardSender(0, 1, CPU)
    route, ends = route_in(at), list[ShardEnd]()
    for seed in (1, 2):
        weights, taken = weights_of(seed), dict[str, Tensor]()
        export = export_of(sender, weights)
        assert export.shards is not None
        export.shards.route = route

        def take(taken: dict[str, Tensor] = taken) -> int:
            if not ends:
                ends.append(receiving(route))
            return ends[0].take(lambda parts: taken.update({spec.name: tensor for spec, _, tensor in parts}))

        assert together(partial(list, export.buckets), take)[1] == export.shards.digest
        assert all(torch.equal(taken[name], weights[name]) for name in weights)
    sender.close()
    ends[0].group.close()


def test_two_ranks_send_and_fail_together() -> None:
    launch(run_rank, (free_address(),), 2)


def test_what_ranks_hold_is_told_once_and_again_where_it_changes() -> None:
    launch(run_refits, (free_address(),), 2)


def test_without_a_route_nothing_is_sent() -> None:
    export = export_of(ShardSender(0, 1, CPU), weights_of(1))
    assert list(export.buckets) == []
    assert export.shards is not None
    assert export.shards.digest == 0


def test_a_missing_part_is_an_error_at_both_ends() -> None:
    at, held = store(), WHOLE[:2]
    export = export_of(ShardSender(0, 1, CPU), weights_of(1), held)
    assert export.shards is not None
    export.shards.route = route_in(at)
    errors = together(lambda: list(export.buckets), lambda: receiving(route_in(at), held))
    for error in errors:
        assert isinstance(error, RefitError)
        assert "wants 24 elements of c, of which 0 are held" in str(error)


def test_exports_of_other_tensors_take_turns_in_one_group() -> None:
    at, sender, weights = store(), ShardSender(0, 1, CPU), weights_of(1)
    group, ends = group_in(route_in(at), 1, 2), dict[int, ShardEnd]()
    for count, number in ((3, 1), (2, 2), (3, 1), (2, 2)):
        specs, wanted = SPECS[:count], WHOLE[:count]
        export = sender.export(REQUEST, specs, wanted, lambda part: {whole_slice(spec): weights[spec.name] for spec in part})
        assert export.shards is not None
        export.shards.route, taken = route_in(at, [wanted]), dict[str, Tensor]()

        def take(taken: dict[str, Tensor] = taken, number: int = number, shards: ShardExport = export.shards) -> int:
            if number not in ends:
                layouts = {"specs": SPECS[: len(shards.held[0])], "held": shards.held, "wanted": shards.held}
                ends[number] = ShardEnd(**layouts, group=group, number=number, max_bytes=MAX_BYTES)
            return ends[number].take(lambda parts: taken.update({spec.name: tensor for spec, _, tensor in parts}))

        assert together(partial(list, export.buckets), take)[1] == export.shards.digest
        assert all(torch.equal(taken[spec.name], weights[spec.name]) for spec in specs)
    sender.close()
    group.close()


def test_a_route_of_the_same_name_to_fewer_ranks_makes_a_group_anew() -> None:
    at, sender = store(), ShardSender(0, 1, CPU)
    receivers = [ShardReceiver(route=route_in(at), place=place, max_bytes=MAX_BYTES, device=CPU) for place in (0, 1)]
    for count in (2, 1, 1):
        weights, taken = weights_of(count), [dict[str, Tensor]() for _ in range(count)]
        export = export_of(sender, weights)
        assert export.shards is not None
        export.shards.route = route_in(at, [WHOLE] * count)

        def take(place: int, taken: list[dict[str, Tensor]] = taken) -> int:
            load = taken[place].update
            return receivers[place].take(SPECS, [WHOLE], lambda parts: load({spec.name: tensor for spec, _, tensor in parts}))

        _, *digests = together(partial(list, export.buckets), *(partial(take, place) for place in range(count)))
        assert sum(digests) % 2**64 == export.shards.digest
        assert all(torch.equal(own[name], weights[name]) for own in taken for name in weights)
    for end in (sender, *receivers):
        end.close()
