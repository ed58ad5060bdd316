"""A generator rank's side of sharded exports, whatever it is that loads the parts."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rlcore.spi import ShardRoute, ShardSlice, TensorSpec
from rlcore_torchkit.refit.shard_cache import ShardCache
from rlcore_torchkit.refit.shard_group import ProcessShardGroup
from rlcore_torchkit.refit.shard_rendezvous import RefitAnnouncement, Rendezvous
from rlcore_torchkit.refit.shard_route import ShardEnd


class ShardReceiver:
    """One rank of a route. It keeps its process group while the same ranks meet, and a plan of each kind of refit."""

    def __init__(self, *, route: ShardRoute, place: int, max_bytes: int, device: torch.device) -> None:
        """`place` is the rank's among those of the route; each refit names its group and plan.

        WorkerError where the route's store is not there.
        """
        self._place, self._max_bytes, self._device = place, max_bytes, device
        self._rendezvous = Rendezvous(route)
        self._group: tuple[tuple[str, int], ProcessShardGroup] | None = None
        """The group, by its name and the number of the route's first rank in it."""
        self._ends: dict[int, ShardEnd] = {}
        """The ends in the group, by the numbers of their plans."""
        self.received_bytes = 0
        """Bytes that the last refit brought."""

    def take(
        self,
        specs: Sequence[TensorSpec],
        held: Sequence[Sequence[ShardSlice]],
        load: Callable[[list[tuple[TensorSpec, ShardSlice, Tensor]]], None],
        *,
        kept: ShardCache | None = None,
        weight_version: int = 0,
        only_changed: bool = False,
    ) -> int:
        """Refit once, as ShardEnd.take. `held` is what each of the trainer's ranks holds of `specs`.

        RefitError, WorkerError as of ShardEnd, and where no refit comes. The rank has left the group then, so that the others
        do not wait for it."""
        try:
            end = self._joined(specs, held)
            digest = end.take(load, kept=kept, weight_version=weight_version, only_changed=only_changed)
            self.received_bytes = end.received_bytes
            return digest
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._group is not None:
            self._group[1].close()
        self._group, self._ends = None, {}

    def _joined(self, specs: Sequence[TensorSpec], held: Sequence[Sequence[ShardSlice]]) -> ShardEnd:
        """Return the end of the plan that the trainer names this time. A new plan keeps the group."""
        announcement = self._rendezvous.hear()
        name = announcement.group, announcement.first
        if self._group is not None and self._group[0] != name:
            self.close()
        end = self._ends.get(announcement.plan)
        if end is None or end.specs != specs:
            self._ends = {number: each for number, each in self._ends.items() if each.specs != specs}
            end = self._ends[announcement.plan] = self._planned(announcement, specs, held)
        return end

    def _planned(
        self, announcement: RefitAnnouncement, specs: Sequence[TensorSpec], held: Sequence[Sequence[ShardSlice]]
    ) -> ShardEnd:
        route = self._rendezvous.route(announcement)
        if self._group is None:
            rank, num_ranks = len(held) + announcement.first + self._place, len(held) + len(route.wanted)
            self._group = (announcement.group, announcement.first), ProcessShardGroup(route, rank, num_ranks, self._device)
        return ShardEnd(
            specs=specs,
            held=held,
            wanted=route.wanted,
            group=self._group[1],
            number=announcement.plan,
            max_bytes=self._max_bytes,
        )
