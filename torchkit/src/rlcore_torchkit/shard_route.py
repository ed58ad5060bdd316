"""One rank's end of a route: the plan of what it sends or takes, in windows, and the group by which it does."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod

import torch
from attrs import frozen
from torch import Tensor

from rlcore.spi import RefitError
from rlcore.spi.shards import Box, ShardRoute
from rlcore.spi.weights import ITEM_BYTES, TensorSpec
from rlcore_torchkit.shard_group import ProcessShardGroup
from rlcore_torchkit.shard_plan import plan_pieces
from rlcore_torchkit.shard_transfer import Bucket, ShardTransfer, make_bucket_list

PIECES_PER_WINDOW = 4
"""A part is cut into so many pieces at most where replicas can share it."""


@frozen(kw_only=True)
class Window:
    """Tensors that travel at one time: no rank holds others whole meanwhile."""

    specs: tuple[TensorSpec, ...]
    buckets: tuple[Bucket, ...]


def plan_windows(
    specs: Sequence[TensorSpec], held: Sequence[Sequence[Box]], wanted: Sequence[Sequence[Box]], max_bytes: int
) -> tuple[Window, ...]:
    """The plan of each window, which every rank works out alike. RefitError where there is none."""
    runs = list(_runs(specs, max_bytes))
    number_of = {spec.name: number for number, run in enumerate(runs) for spec in run}
    parts = [_divided(layout, number_of, len(runs)) for layout in (held, wanted)]
    return tuple(
        Window(
            specs=tuple(run),
            buckets=make_bucket_list(
                plan_pieces(run, parts[0][number], parts[1][number], max(1, max_bytes // PIECES_PER_WINDOW)), max_bytes
            ),
        )
        for number, run in enumerate(runs)
    )


class ShardEnd:
    """A rank in the group of a route, for as many refits as the layouts stay the same."""

    def __init__(
        self,
        *,
        specs: Sequence[TensorSpec],
        held: Sequence[Sequence[Box]],
        route: ShardRoute,
        rank: int,
        max_bytes: int,
        device: torch.device,
    ) -> None:
        """`rank` counts in the group: the trainer's first. RefitError, WorkerError as of ProcessShardGroup."""
        world_size = len(held) + len(route.wanted)
        self.windows: tuple[Window, ...] = ()
        try:
            self.windows = plan_windows(specs, held, route.wanted, max_bytes)
            plan = hashlib.sha256(repr(self.windows).encode()).hexdigest()
        except RefitError as error:
            plan = f"!{error}"
        self._group = ProcessShardGroup(route, rank, world_size, device, plan)
        self._num_senders, self._device = len(held), device

    def run(self, number: int, held: Mapping[Box, Tensor], wanted: Mapping[Box, Tensor]) -> int:
        """A window's pieces; returns the sum mod 2^64 of the digests of what this rank has sent or taken."""
        window = self.windows[number]
        transfer = ShardTransfer(
            specs=window.specs, buckets=window.buckets, num_senders=self._num_senders, group=self._group, device=self._device
        )
        return transfer.run(held, wanted)

    def take(self, wanted: Sequence[Box], load: Callable[[list[tuple[TensorSpec, Box, Tensor]]], None]) -> int:
        """Receive every window into new tensors and have each loaded; returns the sum of digests."""
        total, of_name = 0, {box.name: box for box in wanted}
        for number, window in enumerate(self.windows):
            parts = [(spec, of_name[spec.name]) for spec in window.specs if spec.name in of_name]
            tensors = [(spec, box, self._empty(spec, box)) for spec, box in parts]
            total += self.run(number, {}, {box: tensor for _, box, tensor in tensors})
            load(tensors)
        return total % 2**64

    def close(self) -> None:
        self._group.close()

    def _empty(self, spec: TensorSpec, box: Box) -> Tensor:
        return torch.empty(box.shape, dtype=getattr(torch, spec.dtype), device=self._device)


def whole_box(spec: TensorSpec) -> Box:
    return Box(spec.name, (0,) * len(spec.shape), spec.shape)


def _runs(specs: Sequence[TensorSpec], max_bytes: int) -> Iterator[list[TensorSpec]]:
    run, size = list[TensorSpec](), 0
    for spec in specs:
        num_bytes = prod(spec.shape) * ITEM_BYTES[spec.dtype]
        if run and size + num_bytes > max_bytes:
            yield run
            run, size = [], 0
        run.append(spec)
        size += num_bytes
    if run:
        yield run


def _divided(layout: Sequence[Sequence[Box]], number_of: Mapping[str, int], num_runs: int) -> list[list[list[Box]]]:
    """The parts of each rank, window by window; those of an unknown tensor stand in the first, whose plan names them."""
    divided: list[list[list[Box]]] = [[[] for _ in layout] for _ in range(num_runs)]
    for rank, boxes in enumerate(layout):
        for box in boxes:
            divided[number_of.get(box.name, 0)][rank].append(box)
    return divided
