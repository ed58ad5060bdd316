"""A generator rank's side of sharded exports, whatever it is that loads the parts."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rlcore.spi import ShardRoute, ShardSlice, TensorSpec
from rlcore_torchkit.refit.shard_cache import ShardCache
from rlcore_torchkit.refit.shard_rendezvous import Rendezvous
from rlcore_torchkit.refit.shard_route import ShardEnd


class ShardReceiver:
    """One rank of a route, for as many refits as the layouts stay the same; others may come to its group, and leave it."""

    def __init__(
        self,
        *,
        specs: Sequence[TensorSpec],
        held: Sequence[Sequence[ShardSlice]],
        route: ShardRoute,
        place: int,
        max_bytes: int,
        device: torch.device,
    ) -> None:
        """`place` is the rank's among those of the route; what these want is heard with each refit.

        WorkerError where the route's store is not there.
        """
        self._specs, self._held, self._place = specs, held, place
        self._max_bytes, self._device = max_bytes, device
        self._rendezvous = Rendezvous(route)
        self._end: tuple[tuple[str, str, int], ShardEnd] | None = None
        self.received_bytes = 0
        """Bytes that the last refit brought."""

    def take(
        self,
        load: Callable[[list[tuple[TensorSpec, ShardSlice, Tensor]]], None],
        *,
        kept: ShardCache | None = None,
        weight_version: int = 0,
        only_changed: bool = False,
    ) -> int:
        """Refit once, as ShardEnd.take. RefitError, WorkerError as of ShardEnd, and where no refit comes; the rank has left the
        group then, so that the others do not wait for it."""
        try:
            end = self._joined()
            digest = end.take(load, kept=kept, weight_version=weight_version, only_changed=only_changed)
            self.received_bytes = end.received_bytes
            return digest
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._end is not None:
            self._end[1].close()
        self._end = None

    def _joined(self) -> ShardEnd:
        """The end of the route by which all go this time."""
        route, first = self._rendezvous.hear()
        meeting = route.address, route.name, first
        if self._end is None or self._end[0] != meeting:
            self.close()
            rank = len(self._held) + first + self._place
            end = ShardEnd(
                specs=self._specs, held=self._held, route=route, rank=rank, max_bytes=self._max_bytes, device=self._device
            )
            self._end = meeting, end
        return self._end[1]
