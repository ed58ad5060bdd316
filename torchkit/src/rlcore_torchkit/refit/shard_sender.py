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
from rlcore_torchkit.refit.shard_rendezvous import Rendezvous, common_route, first_ranks
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
class _Plan:
    """The layouts that an end was made for."""

    specs: tuple[TensorSpec, ...]
    held: tuple[tuple[ShardSlice, ...], ...]
    routes: tuple[ShardRoute, ...]
    max_bucket_bytes: int


class ShardSender:
    """Keeps the groups of the routes by which it has sent."""

    def __init__(self, rank: int, world_size: int, device: torch.device) -> None:
        self._rank, self._world_size, self._device = rank, world_size, device
        self._ends: dict[Meeting, tuple[_Plan, ShardEnd]] = {}
        self._rendezvous: dict[tuple[str, str], Rendezvous] = {}
        self._num_made: Counter[Meeting] = Counter()
        """The number of times that each group has been made, so that none is taken for one that met before."""
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
        for _, end in self._ends.values():
            end.close()
        self._ends, self._rendezvous = {}, {}
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
        """The end of the route that all of these have in common, of which the generators' ranks are told."""
        meeting = tuple((route.address, route.name) for route in routes)
        self._leave_others(meeting, specs)
        known, plan = self._ends.get(meeting), _Plan(specs, shards.held, tuple(routes), shards.max_bucket_bytes)
        if known is not None and known[0] != plan:
            raise RefitError(f"refit: another layout by the route {'/'.join(meeting[0])}; expected a new name for it")
        self._num_made[meeting] += known is None
        route = common_route(routes, self._num_made[meeting])
        if shards.route is not None:
            self._tell(shards.route, route, dict(zip(meeting, first_ranks(routes), strict=True)))
        if known is not None:
            return known[1]
        end = ShardEnd(
            specs=specs,
            held=shards.held,
            route=route,
            rank=self._rank,
            max_bytes=shards.max_bucket_bytes,
            device=self._device,
        )
        self._ends[meeting] = plan, end
        return end

    def _leave_others(self, meeting: Meeting, specs: tuple[TensorSpec, ...]) -> None:
        """Close ends whose stores are gone, whose generators now meet others, or which other parts of these tensors replace."""
        addresses = {address for address, _ in meeting}
        for other in [*self._ends]:
            is_lost = not addresses.issuperset(address for address, _ in other)
            is_replaced = self._ends[other][0].specs == specs or not {*other}.isdisjoint(meeting)
            if is_lost or (other != meeting and is_replaced):
                self._ends.pop(other)[1].close()

    def _tell(self, own: ShardRoute, common: ShardRoute, place_of: Mapping[tuple[str, str], int]) -> None:
        """Tell the ranks of this rank's generator the common route, for which they wait."""
        key = own.address, own.name
        self._rendezvous = {known: notices for known, notices in self._rendezvous.items() if known[0] == own.address}
        if key not in self._rendezvous:
            self._rendezvous[key] = Rendezvous(own)
        self._rendezvous[key].tell(common, place_of[key])

    def _gathered(self, own: Any) -> list[Any]:
        """Gather a value from every rank of the trainer, in their order."""
        if self._world_size == 1:
            return [own]
        found: list[Any] = [None] * self._world_size
        dist.all_gather_object(found, own)
        return found
