"""Eight ranks that hold shards and four, of two engines with two each, that want others, all in one process group of gloo."""

from datetime import timedelta
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from rlcore.spi.weights import ShardRoute, ShardSlice, TensorSpec
from rlcore_torchkit.distributed.process_group import keep_on_loopback, listening_store
from rlcore_torchkit.refit.shard_transfer import TransferStats

from .shard_threads import end_of  # type: ignore[import-not-found]

NUM_SENDERS, NUM_RECEIVERS = 8, 4
Specs: TypeAlias = tuple[TensorSpec, ...]
Layout: TypeAlias = list[list[ShardSlice]]
DENSE = (TensorSpec(name="mlp", shape=(32, 24), dtype="bfloat16"), TensorSpec(name="norm", shape=(7,), dtype="float32"))
EXPERTS = tuple(TensorSpec(name=f"expert.{n}", shape=(8, 12), dtype="float32") for n in range(16))


def cut(specs: tuple[TensorSpec, ...], ranks: int, dim: int, parts: int) -> list[list[ShardSlice]]:
    """Tensors cut along a dimension, the parts in turn over ranks; one that has too little of it is whole everywhere."""
    layout: list[list[ShardSlice]] = [[] for _ in range(ranks)]
    for spec in specs:
        for rank in range(ranks):
            start, stop = [0] * len(spec.shape), list(spec.shape)
            if dim < len(spec.shape) and spec.shape[dim] >= parts:
                start[dim], stop[dim] = (spec.shape[dim] * place // parts for place in (rank % parts, rank % parts + 1))
            layout[rank].append(ShardSlice(spec.name, tuple(start), tuple(stop)))
    return layout


def by_expert(ranks: int, parts: int) -> list[list[ShardSlice]]:
    return [
        [
            ShardSlice(spec.name, (0, 0), spec.shape)
            for n, spec in enumerate(EXPERTS)
            if n * parts // len(EXPERTS) == rank % parts
        ]
        for rank in range(ranks)
    ]


CASES = {
    "fsdp to tensor parallel": (DENSE, cut(DENSE, 8, 0, 8), cut(DENSE, 4, 0, 4)),
    "fsdp to columns": (DENSE, cut(DENSE, 8, 0, 8), cut(DENSE, 4, 1, 2)),
    "tensor parallel to whole": (DENSE, cut(DENSE, 8, 1, 2), cut(DENSE, 4, 0, 1)),
    "replicas to replicas": (DENSE, cut(DENSE, 8, 0, 1), cut(DENSE, 4, 0, 1)),
    "experts to experts": (EXPERTS, by_expert(8, 8), by_expert(4, 2)),
    "experts to their columns": (EXPERTS, by_expert(8, 4), cut(EXPERTS, 4, 1, 4)),
    "fsdp to whole": (DENSE, cut(DENSE, 8, 0, 8), cut(DENSE, 4, 0, 1)),
    "experts to whole": (EXPERTS, by_expert(8, 8), cut(EXPERTS, 4, 0, 1)),
    "columns of experts to whole": (EXPERTS, cut(EXPERTS, 8, 1, 4), cut(EXPERTS, 4, 0, 1)),
}


EVEN = {"experts to experts", "experts to whole", "columns of experts to whole"}
"""The cases in which all senders have as much to send."""


def values_of(spec: TensorSpec, number: int) -> Tensor:
    return torch.randn(spec.shape, generator=torch.Generator().manual_seed(number)).to(getattr(torch, spec.dtype))


def run_rank(rank: int, address: str, store: str) -> None:
    keep_on_loopback()
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=NUM_SENDERS + NUM_RECEIVERS)
    host, _, port = store.removeprefix("tcp://").rpartition(":")
    # Held by rank 0 alone, as by the process that begins a refit.
    kept = [listening_store(host, int(port), None, timedelta(seconds=300), wait_for_workers=False)] if rank == 0 else []
    dist.barrier()
    for case, (specs, held, wanted) in CASES.items():
        run_case(case, specs, held, wanted, rank, f"{host}:{port}")
    dist.barrier()
    del kept
    dist.destroy_process_group()


def run_case(case: str, specs: Specs, held: Layout, wanted: Layout, rank: int, store: str) -> None:
    full = {spec.name: values_of(spec, number) for number, spec in enumerate(specs)}
    route = ShardRoute(address=store, name=case, wanted=tuple(map(tuple, wanted)), timeout_s=300)
    end = end_of(route, held, specs, rank=rank, max_bytes=1024)
    assert len(end.windows) > 1
    if rank < NUM_SENDERS:
        parts, moved = {box: cut_out(full, box).float() for box in held[rank]}, TransferStats(digest=0)
        for number in range(len(end.windows)):
            moved += end.run(number, parts, {})
        total, sent = moved.digest, moved.sent_bytes
    else:
        sent = 0
        taken: dict[ShardSlice, Tensor] = {}
        own = end.wanted[rank - NUM_SENDERS]
        total = end.take(lambda parts: taken.update({box: tensor for _, box, tensor in parts}))
        assert {*taken} == {*own}, case
        assert all(torch.equal(tensor, cut_out(full, box)) for box, tensor in taken.items()), case
    dist.barrier()  # what is under way on other ranks fails where one has left
    end.group.close()
    totals: list[tuple[int, int]] = [(0, 0)] * (NUM_SENDERS + NUM_RECEIVERS)
    dist.all_gather_object(totals, (total, sent))
    digests = [digest for digest, _ in totals]
    assert sum(digests[:NUM_SENDERS]) % 2**64 == sum(digests[NUM_SENDERS:]) % 2**64 != 0, case
    each = [sent for _, sent in totals[:NUM_SENDERS]]
    # Each bucket has its digest, and pieces are aligned.
    pieces = [piece for window in end.windows for bucket in window.buckets for piece in bucket.pieces]
    num_buckets = sum(len(window.buckets) for window in end.windows)
    model = sum(tensor.nbytes for tensor in full.values())
    assert model <= sum(each) <= model + 15 * len(pieces) + 8 * num_buckets, case
    if case in EVEN:
        assert max(each) == min(each), case


def cut_out(full: dict[str, Tensor], box: ShardSlice) -> Tensor:
    return full[box.name][tuple(map(slice, box.start, box.stop))]
