"""One rank's end of a plan: what it sends and takes, in windows."""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence, Set
from contextlib import nullcontext
from functools import cached_property
from math import prod
from typing import TypeAlias

import torch
from attrs import frozen
from torch import Tensor

from rlcore.spi import RefitError
from rlcore.spi.weights import ITEM_BYTES, ShardSlice, TensorSpec
from rlcore_torchkit.refit.shard_cache import NOTHING, ShardCache
from rlcore_torchkit.refit.shard_group import ProcessShardGroup
from rlcore_torchkit.refit.shard_plan import Piece, plan_pieces
from rlcore_torchkit.refit.shard_slices import Layout, common_refinement, first_equal_ranks
from rlcore_torchkit.refit.shard_slices import whole_slice as whole_slice
from rlcore_torchkit.refit.shard_transfer import Bucket, ShardTransfer, TransferStats, make_bucket_list

PIECES_PER_WINDOW = 4
"""A part is cut into so many pieces at most where replicas can share it."""


Part: TypeAlias = tuple[TensorSpec, ShardSlice]


@frozen(kw_only=True)
class Window:
    """Tensors that travel at one time: no rank holds others whole meanwhile."""

    specs: tuple[TensorSpec, ...]
    buckets: tuple[Bucket, ...]


def plan_windows(
    specs: Sequence[TensorSpec], held: Sequence[Sequence[ShardSlice]], wanted: Sequence[Sequence[ShardSlice]], max_bytes: int
) -> tuple[Window, ...]:
    """The plan of each window, which every rank works out alike. RefitError where there is none."""
    runs = list(_runs(specs, max_bytes))
    number_of = {spec.name: number for number, run in enumerate(runs) for spec in run}
    parts = [_divided(layout, number_of, len(runs)) for layout in (held, wanted)]
    return tuple(
        Window(
            specs=tuple(run),
            buckets=make_bucket_list(
                run, plan_pieces(run, parts[0][number], parts[1][number], max(1, max_bytes // PIECES_PER_WINDOW)), max_bytes
            ),
        )
        for number, run in enumerate(runs)
    )


class ShardEnd:
    """A rank's plan of what it sends and takes. It serves any number of refits, in a group that other plans use too."""

    def __init__(
        self,
        *,
        specs: Sequence[TensorSpec],
        held: Sequence[Sequence[ShardSlice]],
        wanted: Sequence[Sequence[ShardSlice]],
        group: ProcessShardGroup,
        number: int,
        max_bytes: int,
    ) -> None:
        """`held` has the parts of each rank of the trainer, `wanted` those of each rank of the generators. `number` counts the
        plans of the group. RefitError, WorkerError as of ProcessShardGroup.agree."""
        self.specs, self.group = specs, group
        self.windows: tuple[Window, ...] = ()
        self.wanted: Layout = common_refinement(wanted)
        """Parts that are equal or have nothing in common: what several ranks want is sent once."""
        self.received_bytes = 0
        """Bytes that the last `take` brought, from the trainer's ranks and from others that take the same."""
        try:
            self.windows = plan_windows(specs, held, self.wanted, max_bytes)
            plan = _digest(self.windows)
        except RefitError as error:
            plan = f"!{error}"
        self._num_senders, self._device, self._rank = len(held), group.device, group.rank
        group.agree(number, plan, self._sharing())

    def in_step(self, version: int) -> Set[int]:
        """Return the peers that keep the same version as this rank: changes alone can go to them. A collective before the first
        window; NOTHING stands for a rank that keeps none."""
        told = torch.tensor([version], device=self._device)
        heard = {peer: torch.empty_like(told) for peer in self._peers()}
        if heard:
            self.group.exchange([(peer, told) for peer in heard], list(heard.items()))
        return {peer for peer, other in heard.items() if version != NOTHING and int(other) == version}

    def run(
        self,
        number: int,
        held: Mapping[ShardSlice, Tensor],
        wanted: MutableMapping[ShardSlice, Tensor],
        *,
        last: Mapping[ShardSlice, Tensor] | None = None,
        in_step: Set[int] | None = None,
    ) -> TransferStats:
        """A window's pieces, as ShardTransfer.run."""
        transfer = ShardTransfer(
            buckets=self.windows[number].buckets, num_senders=self._num_senders, group=self.group, device=self._device
        )
        return transfer.run(held, wanted, last=last, in_step=in_step)

    def take(
        self,
        load: Callable[[list[tuple[TensorSpec, ShardSlice, Tensor]]], None],
        *,
        kept: ShardCache | None = None,
        weight_version: int = 0,
        only_changed: bool = False,
    ) -> int:
        """Receive every window and have each loaded; returns the sum of digests.

        With `kept` changes alone may come: to these copies, which are of `weight_version` then. With `only_changed` tensors are
        not loaded of which all parts are as they were."""
        total = TransferStats(digest=0)
        if kept is not None:
            kept.require(self.wanted[self._rank - self._num_senders])
        in_step = None if kept is None else self.in_step(kept.version)
        with nullcontext() if kept is None else kept.changing(weight_version):
            for number, (parts, empty) in enumerate(self._wanted_parts):
                given = empty if kept is None else parts
                tensors = {
                    box: self._empty(spec, box) if kept is None else kept.on(self._device, spec, box) for spec, box in given
                }
                moved = self.run(number, {}, tensors, in_step=in_step)
                if kept is not None:
                    kept.take_back({box: tensors[box] for box in moved.changed})
                changed = {box.name for box in moved.changed}
                load([(spec, box, tensors[box]) for spec, box in parts if not only_changed or box.name in changed])
                total += moved
        self.received_bytes = total.received_bytes
        return total.digest

    def pieces(self, number: int) -> Iterator[Piece]:
        """Return the pieces that this rank sends in a window."""
        for bucket in self.windows[number].buckets:
            yield from bucket.pieces if bucket.sender == self._rank else ()

    def sent_boxes(self) -> list[ShardSlice]:
        """Return the parts that this rank sends, each once."""
        return list(dict.fromkeys(piece.box for number in range(len(self.windows)) for piece in self.pieces(number)))

    def _peers(self) -> Set[int]:
        """The receivers of what this rank sends, or the senders of what it receives."""
        between = {(bucket.sender, bucket.receivers) for window in self.windows for bucket in window.buckets}
        own = self._rank - self._num_senders
        senders = {sender for sender, receivers in between if own in receivers}
        return senders | {self._num_senders + each for sender, ranks in between if sender == self._rank for each in ranks}

    def _sharing(self) -> list[tuple[int, ...]]:
        """The ranks, two or more, that share what they receive, as the group counts them."""
        several = {bucket.receivers for window in self.windows for bucket in window.buckets if len(bucket.receivers) > 1}
        return [tuple(self._num_senders + receiver for receiver in receivers) for receivers in sorted(several)]

    def _empty(self, spec: TensorSpec, box: ShardSlice) -> Tensor:
        return torch.empty(box.shape, dtype=getattr(torch, spec.dtype), device=self._device)

    @cached_property
    def _wanted_parts(self) -> list[tuple[list[Part], list[Part]]]:
        """The parts that this rank receives in each window, in the order of the tensors, and those without elements."""
        of_name: dict[str, list[ShardSlice]] = defaultdict(list)
        for box in self.wanted[self._rank - self._num_senders]:
            of_name[box.name].append(box)
        windows = [[(spec, box) for spec in window.specs for box in of_name.get(spec.name, ())] for window in self.windows]
        return [(parts, [part for part in parts if not part[1].size]) for parts in windows]


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


def _divided(
    layout: Sequence[Sequence[ShardSlice]], number_of: Mapping[str, int], num_runs: int
) -> list[list[list[ShardSlice]]]:
    """Return the parts of each rank, window by window, in one list for ranks with the same parts. Unknown tensors are in the
    first."""
    firsts = first_equal_ranks(layout)
    divided: dict[int, list[list[ShardSlice]]] = {}
    for rank in dict.fromkeys(firsts):
        runs = divided[rank] = [[] for _ in range(num_runs)]
        for box in layout[rank]:
            runs[number_of.get(box.name, 0)].append(box)
    return [[divided[first][number] for first in firsts] for number in range(num_runs)]


def _digest(windows: Sequence[Window]) -> str:
    """Differs where ranks would send or take something else, or in another order."""
    found = hashlib.sha256()
    for window in windows:
        found.update(repr([spec.name for spec in window.specs]).encode())
        for bucket in window.buckets:
            # By names and numbers alone: what an attrs class says of itself takes four times as long.
            pieces = [
                (piece.num_bytes, *((box.name, box.start, box.stop) for box in (piece.box, piece.held, piece.wanted)))
                for piece in bucket.pieces
            ]
            found.update(repr((bucket.number, bucket.sender, bucket.receivers, pieces)).encode())
    return found.hexdigest()
