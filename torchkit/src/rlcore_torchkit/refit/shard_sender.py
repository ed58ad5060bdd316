"""A trainer rank's side of sharded exports, whatever it is that holds the parts."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor

from rlcore.schema.suggestions import listed
from rlcore.spi import (
    ContractError,
    ExportWeightsRequest,
    RefitError,
    RlcoreError,
    ShardExport,
    ShardRoute,
    TensorSpec,
    WeightBucket,
    WeightExport,
)
from rlcore.spi.weights import ShardSlice
from rlcore_torchkit.distributed.cached_all_gather import CachedAllGather
from rlcore_torchkit.refit.digest import tensor_digests
from rlcore_torchkit.refit.shard_cache import ShardCache
from rlcore_torchkit.refit.shard_group import ProcessShardGroup
from rlcore_torchkit.refit.shard_rendezvous import RefitAnnouncement, Rendezvous, common_route, first_ranks
from rlcore_torchkit.refit.shard_route import ShardEnd
from rlcore_torchkit.refit.shard_transfer import TransferStats

ReadParts = Callable[[Sequence[TensorSpec]], Mapping[ShardSlice, Tensor]]
"""This rank's parts of some tensors; called on all ranks in one order, so that it may gather."""
Meeting: TypeAlias = tuple[tuple[str, str], ...]
"""The routes of a refit, each by its address and name."""


@frozen
class _Shared:
    """The parts that several ranks hold, of a layout."""

    held: tuple[tuple[ShardSlice, ...], ...]
    of_tensor: Mapping[str, list[ShardSlice]]
    """By the tensor's name, in one order on all ranks."""

    @classmethod
    def of(cls, held: tuple[tuple[ShardSlice, ...], ...]) -> "_Shared":
        of_tensor: dict[str, list[ShardSlice]] = {}
        for box, count in Counter(chain(*held)).items():
            if count > 1:
                of_tensor.setdefault(box.name, []).append(box)
        return cls(held, of_tensor)


@frozen
class _Layouts:
    """The layouts that a plan is made from."""

    specs: tuple[TensorSpec, ...]
    held: tuple[tuple[ShardSlice, ...], ...]
    routes: tuple[ShardRoute, ...]
    max_bucket_bytes: int


class ShardSender:
    """Keeps the process group with the generators' ranks, and a plan of each kind of export."""

    def __init__(self, rank: int, world_size: int, device: torch.device) -> None:
        self._rank, self._world_size, self._device = rank, world_size, device
        self._group: tuple[Meeting, ProcessShardGroup] | None = None
        self._num_groups: Counter[Meeting] = Counter()
        """The number of groups that each set of routes has made, so that none is taken for an earlier one."""
        self._ends: dict[int, tuple[_Layouts, ShardEnd]] = {}
        """The ends in the group, by the numbers of their plans: exports of weights and of adapters may take turns."""
        self._num_plans = 0
        """The number of plans that the group has made."""
        self._rendezvous: dict[tuple[str, str], Rendezvous] = {}
        self._layouts: CachedAllGather[tuple[ShardSlice, ...]] = CachedAllGather(self._gathered)
        self._routes: CachedAllGather[ShardRoute | None] = CachedAllGather(self._gathered)
        self._shared = _Shared.of(())
        self._kept: tuple[object, ShardCache] | None = None
        """The copies that were sent last, and of which tensors and layout."""

    def export(
        self, request: ExportWeightsRequest, specs: tuple[TensorSpec, ...], own: Sequence[ShardSlice], read: ReadParts
    ) -> WeightExport:
        """Export the boxes that this rank holds; a collective of the trainer. Boxes travel to the other ranks where one has
        changed."""
        held = self._layouts.by_all(tuple(own))
        shards = ShardExport(held=held, max_bucket_bytes=request.max_bucket_bytes, delta=request.delta)
        buckets = self._send(request.weight_version, shards, specs, read)
        return WeightExport(
            weight_version=request.weight_version, specs=specs, buckets=buckets, persistent=False, shards=shards
        )

    def close(self) -> None:
        self._kept = None
        self._leave()
        self._rendezvous = {}
        self._layouts.forget()
        self._routes.forget()

    def _send(
        self, weight_version: int, shards: ShardExport, specs: tuple[TensorSpec, ...], read: ReadParts
    ) -> Iterator[WeightBucket]:
        routes = [route for route in self._routes.by_all(shards.route) if route is not None]
        end: ShardEnd | None = None
        in_step: Set[int] | None = None
        total, kept = TransferStats(digest=0), self._kept_of(shards, specs) if routes else None
        with self._failing_together():
            if routes:
                end = self._joined(routes, shards, specs)
                if kept is not None:
                    kept.require(end.sent_boxes())
                in_step = None if kept is None else end.in_step(kept.version)
        if self._shared.held is not shards.held:
            self._shared = _Shared.of(shards.held)
        with nullcontext() if kept is None else kept.changing(weight_version):
            for number, window in enumerate(() if end is None else end.windows):
                parts = read(window.specs)
                with self._failing_together():
                    self._require_equal(window.specs, parts)
                    assert end is not None
                    total += end.run(number, parts, {}, last=None if kept is None else kept.tensors, in_step=in_step)
                    if kept is not None:
                        pieces = {piece.box: piece for piece in end.pieces(number)}
                        kept.put(
                            {box: parts[piece.held][box.within(piece.held)] for box, piece in pieces.items()}, window.specs
                        )
        shards.digest, shards.sent_bytes = total.digest, total.sent_bytes
        yield from ()

    def _kept_of(self, shards: ShardExport, specs: tuple[TensorSpec, ...]) -> ShardCache | None:
        """Return the copies of such an export, empty the first time, and drop those of others. None where changes are not asked
        for."""
        if shards.delta == "off":
            self._kept = None
            return None
        plan = (specs, shards.held, shards.max_bucket_bytes, shards.delta)
        if self._kept is None or self._kept[0] != plan:
            self._kept = plan, ShardCache(self._device if shards.delta == "device" else torch.device("cpu"))
        return self._kept[1]

    def _require_equal(self, specs: Sequence[TensorSpec], parts: Mapping[ShardSlice, Tensor]) -> None:
        """Raise ContractError where ranks that hold the same part hold different values: each sends some of its replicas'."""
        dtypes = {spec.name: getattr(torch, spec.dtype) for spec in specs}
        shared = [box for name in dtypes for box in self._shared.of_tensor.get(name, ())]
        if not shared:
            return
        mine = [box for box in shared if box in parts]
        found = dict(zip(mine, tensor_digests(parts[box].detach().to(dtypes[box.name]) for box in mine), strict=True))
        signed = [found[box] - 2**63 if box in found else 2**63 - 1 for box in shared]
        opposite = [~(found[box] - 2**63) if box in found else 2**63 - 1 for box in shared]
        least = torch.tensor([signed, opposite], device=self._device)
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        lowest, highest = least[0].tolist(), (~least[1]).tolist()
        different = [box.name for box, low, high in zip(shared, lowest, highest, strict=True) if low != high]
        if different:
            names = listed(list(dict.fromkeys(different)), 3)
            raise ContractError(
                f"export_weights: ranks that hold the same parts of {names} hold different values: they have come apart"
            )

    @contextmanager
    def _failing_together(self) -> Iterator[None]:
        """Fail on all ranks where one fails: the others would wait for it in their next gather."""
        failure: RlcoreError | None = None
        try:
            yield
        except RlcoreError as error:
            failure = error
        failures = self._gathered(None if failure is None else str(failure))
        found = [f"rank {rank}: {text}" for rank, text in enumerate(failures) if text is not None]
        if found:
            self.close()
            raise failure or RefitError(f"refit: another rank of the trainer failed: {listed(found, 3)}")

    def _joined(self, routes: Sequence[ShardRoute], shards: ShardExport, specs: tuple[TensorSpec, ...]) -> ShardEnd:
        """Publish the refit to the generators' ranks; return the end of these layouts. A new plan keeps the group."""
        meeting = tuple((route.address, route.name) for route in routes)
        if self._group is not None and self._group[0] != meeting:
            self._leave()
        num_ranks = len(shards.held) + sum(len(each.wanted) for each in routes)
        if self._group is not None and self._group[1].world_size != num_ranks:
            self._leave()  # the same routes reach more ranks, or fewer
        self._num_groups[meeting] += self._group is None
        route = common_route(routes, self._num_groups[meeting])
        layouts = _Layouts(specs, shards.held, tuple(routes), shards.max_bucket_bytes)
        number = next((number for number, (known, _) in self._ends.items() if known == layouts), None)
        plan = self._num_plans + 1 if number is None else number
        if shards.route is not None:
            firsts = dict(zip(meeting, first_ranks(routes), strict=True))
            own = shards.route.address, shards.route.name
            self._tell(shards.route, route, RefitAnnouncement(route.name, plan, firsts[own]))
        if number is None:
            self._add_end(meeting, route, layouts)
        return self._ends[plan][1]

    def _add_end(self, meeting: Meeting, route: ShardRoute, layouts: _Layouts) -> None:
        """Plan anew, in place of an earlier plan for the same tensors."""
        if self._group is None:
            num_ranks = len(layouts.held) + len(route.wanted)
            self._group = meeting, ProcessShardGroup(route, self._rank, num_ranks, self._device)
        self._ends = {number: each for number, each in self._ends.items() if each[0].specs != layouts.specs}
        self._num_plans += 1
        self._ends[self._num_plans] = (
            layouts,
            ShardEnd(
                specs=layouts.specs,
                held=layouts.held,
                wanted=route.wanted,
                group=self._group[1],
                number=self._num_plans,
                max_bytes=layouts.max_bucket_bytes,
            ),
        )

    def _leave(self) -> None:
        """Leave the group, with all plans in it."""
        if self._group is not None:
            self._group[1].close()
        self._group, self._ends, self._num_plans = None, {}, 0

    def _tell(self, own: ShardRoute, common: ShardRoute, announcement: RefitAnnouncement) -> None:
        """Tell the ranks of this rank's generator of the refit, for which they wait."""
        key = own.address, own.name
        self._rendezvous = {known: each for known, each in self._rendezvous.items() if known[0] == own.address}
        if key not in self._rendezvous:
            self._rendezvous[key] = Rendezvous(own)
        self._rendezvous[key].tell(common, announcement)

    def _gathered(self, own: Any) -> list[Any]:
        """Gather a value from every rank of the trainer, in their order."""
        if self._world_size == 1:
            return [own]
        found: list[Any] = [None] * self._world_size
        dist.all_gather_object(found, own)
        return found
