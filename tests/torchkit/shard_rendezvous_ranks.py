"""Two trainer ranks; beside each, in threads, a generator: one of two ranks, and one of a single rank that comes and goes."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from attrs import evolve
from torch import Tensor

from rlcore.spi import ShardExport, ShardSlice, TensorSpec
from rlcore_torchkit.distributed.process_group import keep_on_loopback
from rlcore_torchkit.refit.shard_cache import ShardCache
from rlcore_torchkit.refit.shard_receiver import ShardReceiver
from rlcore_torchkit.refit.shard_sender import ShardSender

from .shard_threads import CPU, MAX_BYTES, REQUEST, SPECS, WHOLE, route_in, store  # type: ignore[import-not-found]

LAYOUT = tuple(tuple(ShardSlice(spec.name, (3 * rank, 0), (3 * rank + 3, 4)) for spec in SPECS) for rank in (0, 1))
NUM_RANKS = (2, 1)
"""Of the generators."""
MODEL_BYTES = len(SPECS) * 6 * 4 * 4
DIGESTS_BYTES = 4 * 8
"""Two windows, and in each a bucket of each trainer rank."""
MOST_OF_CUT_PIECES = 8 * (8 + 2 * 8)
"""Digests of twice as many buckets, and what fills up two pieces in each."""


class Generator:
    """One generator, whose ranks keep what they have taken last."""

    def __init__(self, num_ranks: int) -> None:
        self.store = store()
        self.route = route_in(self.store, [WHOLE] * num_ranks)
        self.receivers = list[ShardReceiver]()
        self.kept = [ShardCache(CPU) for _ in range(num_ranks)]
        self.taken: list[dict[ShardSlice, Tensor]] = [{} for _ in range(num_ranks)]

    def narrow(self) -> None:
        """From now on its ranks want columns of each tensor."""
        columns = [[ShardSlice(spec.name, (0, start), (6, start + 2)) for spec in SPECS] for start in (0, 2)]
        self.route = route_in(self.store, columns)

    def take(self, shards: ShardExport, place: int, version: int) -> int:
        def load(parts: Sequence[tuple[TensorSpec, ShardSlice, Tensor]]) -> None:
            self.taken[place].update({box: tensor.clone() for _, box, tensor in parts})

        return self.receivers[place].take(SPECS, shards.held, load, kept=self.kept[place], weight_version=version)

    def connect(self) -> None:
        if not self.receivers:
            self.receivers = [
                ShardReceiver(route=self.route, place=place, max_bytes=MAX_BYTES, device=CPU) for place in range(len(self.kept))
            ]

    def close(self) -> None:
        for receiver in self.receivers:
            receiver.close()


def run_rank(rank: int, address: str) -> None:
    keep_on_loopback()
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    full = {spec.name: torch.arange(24.0).view(6, 4) + number for number, spec in enumerate(SPECS)}
    sender, generator = ShardSender(rank, 2, CPU), Generator(NUM_RANKS[rank])
    sent, made, make = [], list[int](), dist.ProcessGroupGloo

    def counted(at: Any, own: int, size: int, timeout: Any) -> Any:
        made.append(size)
        return make(at, own, size, timeout)

    dist.ProcessGroupGloo = counted  # type: ignore[assignment, misc]
    for version, is_there in enumerate((True, True, rank == 0, True, True, True, True, True, True)):
        if version == 5 and rank == 1:
            generator.close()
            generator = Generator(NUM_RANKS[rank])
        if version == 7:
            # The other's ranks want what they did, in parts that are cut otherwise.
            generator.taken = [{} for _ in generator.taken]
            if rank == 0:
                generator.narrow()
        full["a"][0, 0] += 1.0
        full["c"][5, 3] += 1.0
        sent.append(refit(rank, sender, generator if is_there else None, full, version))
    # All of it the first time, and where one of the generators has missed a refit or is new; to all, since they share it.
    is_whole = [True, False, False, True, False, True, False, True, False]
    assert [each >= MODEL_BYTES for each in sent] == is_whole
    assert {sent[0], sent[3], sent[5]} == {MODEL_BYTES + DIGESTS_BYTES}
    assert sent[7] <= MODEL_BYTES + MOST_OF_CUT_PIECES
    assert all(each < MODEL_BYTES for each, whole in zip(sent, is_whole, strict=True) if not whole)
    # Of all ranks in refits 0, 3 and 5, and without the second generator in refit 2; not for other parts in refit 7.
    num_here = 1 + NUM_RANKS[rank]
    assert made.count(2 + sum(NUM_RANKS)) == 3 * num_here
    assert made.count(2 + NUM_RANKS[0]) == (num_here if rank == 0 else 1)
    sender.close()
    generator.close()
    dist.destroy_process_group()


def refit(rank: int, sender: ShardSender, generator: Generator | None, full: Mapping[str, Tensor], version: int) -> int:
    """The bytes that both trainer ranks have sent."""

    def read(specs: Sequence[TensorSpec]) -> dict[ShardSlice, Tensor]:
        names = {spec.name for spec in specs}
        return {box: full[box.name][box.start[0] : box.stop[0]] for box in LAYOUT[rank] if box.name in names}

    export = sender.export(evolve(REQUEST, weight_version=version, delta="device"), SPECS, LAYOUT[rank], read)
    assert export.shards is not None
    digests, whole = list[int](), {box.name: box for box in WHOLE}
    with ThreadPoolExecutor(2) as pool:
        if generator is not None:
            generator.connect()
            export.shards.route = generator.route
            places = range(len(generator.receivers))
            takes = [pool.submit(generator.take, export.shards, place, version) for place in places]
        assert list(export.buckets) == []
        if generator is not None:
            digests = [take.result() for take in takes]
            for taken in generator.taken:
                assert {box.name for box in taken} == full.keys()
                assert all(torch.equal(part, full[box.name][box.within(whole[box.name])]) for box, part in taken.items())
    told: list[tuple[int, int, int]] = [(0, 0, 0)] * 2
    dist.all_gather_object(told, (export.shards.digest, sum(digests), export.shards.sent_bytes))
    assert sum(digest for digest, _, _ in told) % 2**64 == sum(digest for _, digest, _ in told) % 2**64 != 0
    return sum(sent_bytes for _, _, sent_bytes in told)
