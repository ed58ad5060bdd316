"""Eight ranks that hold shards and four that want others, all in one process group of gloo."""

import torch
import torch.distributed as dist
from torch import Tensor

from rlcore.spi.weights import TensorSpec
from rlcore_torchkit.process_group import keep_on_loopback
from rlcore_torchkit.shard_plan import Box, plan_pieces
from rlcore_torchkit.shard_transfer import ShardTransfer, make_bucket_list

NUM_SENDERS, NUM_RECEIVERS = 8, 4
DENSE = (TensorSpec(name="mlp", shape=(32, 24), dtype="bfloat16"), TensorSpec(name="norm", shape=(7,), dtype="float32"))
EXPERTS = tuple(TensorSpec(name=f"expert.{n}", shape=(8, 12), dtype="float32") for n in range(16))


def cut(specs: tuple[TensorSpec, ...], ranks: int, dim: int, parts: int) -> list[list[Box]]:
    """Tensors cut along a dimension, the parts in turn over ranks; one that has too little of it is whole everywhere."""
    layout: list[list[Box]] = [[] for _ in range(ranks)]
    for spec in specs:
        for rank in range(ranks):
            start, stop = [0] * len(spec.shape), list(spec.shape)
            if dim < len(spec.shape) and spec.shape[dim] >= parts:
                start[dim], stop[dim] = (spec.shape[dim] * place // parts for place in (rank % parts, rank % parts + 1))
            layout[rank].append(Box(spec.name, tuple(start), tuple(stop)))
    return layout


def by_expert(ranks: int, parts: int) -> list[list[Box]]:
    return [
        [Box(spec.name, (0, 0), spec.shape) for n, spec in enumerate(EXPERTS) if n * parts // len(EXPERTS) == rank % parts]
        for rank in range(ranks)
    ]


CASES = {
    "fsdp to tensor parallel": (DENSE, cut(DENSE, 8, 0, 8), cut(DENSE, 4, 0, 4)),
    "fsdp to columns": (DENSE, cut(DENSE, 8, 0, 8), cut(DENSE, 4, 1, 2)),
    "tensor parallel to whole": (DENSE, cut(DENSE, 8, 1, 2), cut(DENSE, 4, 0, 1)),
    "replicas to replicas": (DENSE, cut(DENSE, 8, 0, 1), cut(DENSE, 4, 0, 1)),
    "experts to experts": (EXPERTS, by_expert(8, 8), by_expert(4, 2)),
    "experts to their columns": (EXPERTS, by_expert(8, 4), cut(EXPERTS, 4, 1, 4)),
}


def values_of(spec: TensorSpec, number: int) -> Tensor:
    return torch.randn(spec.shape, generator=torch.Generator().manual_seed(number)).to(getattr(torch, spec.dtype))


def run_rank(rank: int, address: str) -> None:
    keep_on_loopback()
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=NUM_SENDERS + NUM_RECEIVERS)
    for case, (specs, held, wanted) in CASES.items():
        full = {spec.name: values_of(spec, number) for number, spec in enumerate(specs)}
        buckets = make_bucket_list(plan_pieces(specs, held, wanted, 256), 400)
        transfer = ShardTransfer(
            specs=specs, buckets=buckets, num_senders=NUM_SENDERS, group=dist.group.WORLD, device=torch.device("cpu")
        )
        is_sender = rank < NUM_SENDERS
        boxes = held[rank] if is_sender else wanted[rank - NUM_SENDERS]
        parts = {box: full[box.name][tuple(map(slice, box.start, box.stop))] for box in boxes}
        given = {box: part.float() if is_sender else torch.zeros_like(part) for box, part in parts.items()}
        total = transfer.run(given, {}) if is_sender else transfer.run({}, given)
        if not is_sender:
            assert all(torch.equal(given[box], part) for box, part in parts.items()), case
        totals: list[int] = [0] * (NUM_SENDERS + NUM_RECEIVERS)
        dist.all_gather_object(totals, total)
        sent, received = sum(totals[:NUM_SENDERS]) % 2**64, sum(totals[NUM_SENDERS:]) % 2**64
        assert sent == received != 0, case
    dist.destroy_process_group()
