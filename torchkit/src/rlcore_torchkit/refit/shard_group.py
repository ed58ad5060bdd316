"""The process group in which a trainer's ranks send parts to a generator's, apart from the default group of either."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from rlcore.schema.suggestions import listed
from rlcore.spi import RefitError, ShardRoute, WorkerError
from rlcore_torchkit.distributed.process_group import is_loopback, keep_on_loopback

_REFUSED = "!"
_WATCH = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
"""torch's watch over NCCL, left to those that wait."""
_KEPT_BY_NCCL = timedelta(minutes=10)
"""Seconds by which torch's own watch over NCCL reports a wait later than the wait itself gives up."""


class ShardGroup(Protocol):
    """The operations of a group that a transfer uses."""

    rank: int

    def exchange(self, sent: Sequence[tuple[int, Tensor]], received: Sequence[tuple[int, Tensor]]) -> None:
        """Send to and receive from ranks, all at once; on CUDA in the order of the current stream."""

    def share(self, rooms: Sequence[tuple[tuple[int, ...], Tensor]]) -> None:
        """Complete tensors of which each of some ranks, this one among them, has one of as many equal slices in its place."""


class ProcessShardGroup:
    """A process group over gloo on CPUs, or NCCL on GPUs. It serves any number of plans among the same ranks."""

    def __init__(self, route: ShardRoute, rank: int, world_size: int, device: torch.device) -> None:
        """Connect to the route's store. WorkerError if the store does not answer within `route.timeout_s` seconds."""
        host, _, port = route.address.rpartition(":")
        if is_loopback(host):
            keep_on_loopback()
        timeout = timedelta(seconds=route.timeout_s)
        self.rank, self.world_size, self.device = rank, world_size, device
        self._timeout, self._within = timeout, f"{route.address} in {route.timeout_s:g} s"
        self._backend: Any = None
        self._sharing: dict[tuple[int, ...], Any] = {}
        try:
            store = TCPStore(host, int(port), None, is_master=False, timeout=timeout, wait_for_workers=False)
        except RuntimeError as error:
            raise self._late(error) from error
        self._store = PrefixStore(route.name, store)

    def agree(self, number: int, plan: str, sharing: Sequence[tuple[int, ...]] = ()) -> None:
        """Compare a plan with those of all ranks, then connect to ranks that are not connected yet. A collective.

        `number` counts the plans of this group. `plan` is a digest, or "!" and the reason why this rank has no plan.
        `sharing` holds the ranks of each `share`, two or more, in the same order on all ranks. Each set of ranks has a process
        group, which later plans use again. RefitError on every rank if plans differ, WorkerError if a rank is late or lost."""
        try:
            plans = self._plans(number, plan)
        except RuntimeError as error:
            raise self._late(error) from error
        _require_one(plans)
        try:
            if self._backend is None:
                self._backend = self._connected("group", range(self.world_size))
            for ranks in sharing:
                if self.rank in ranks and ranks not in self._sharing:
                    self._sharing[ranks] = self._connected(f"sharing-{'-'.join(map(str, ranks))}", ranks)
        except RuntimeError as error:
            self.close()
            raise WorkerError(f"refit: channel shards: rank {self.rank} could not reach the others: {error}") from error

    def share(self, rooms: Sequence[tuple[tuple[int, ...], Tensor]]) -> None:
        """WorkerError where a rank is lost or late."""
        works = list[Any]()
        with self._ending(works):
            for ranks, room in rooms:
                share, place = len(room) // len(ranks), ranks.index(self.rank)
                works.append(self._sharing[ranks]._allgather_base(room, room[place * share : (place + 1) * share]))

    def exchange(self, sent: Sequence[tuple[int, Tensor]], received: Sequence[tuple[int, Tensor]]) -> None:
        """WorkerError where a rank is lost or late."""
        if not sent and not received:
            return
        works = list[Any]()
        with self._ending(works):
            if self.device.type == "cuda":
                self._backend._start_coalescing()
            works += [self._backend.send([tensor], peer, 0) for peer, tensor in sent]
            works += [self._backend.recv([tensor], peer, 0) for peer, tensor in received]
            if self.device.type == "cuda":
                works[:] = [self._backend._end_coalescing()]

    def close(self) -> None:
        """Leave; what is under way on other ranks fails."""
        for backend in (self._backend, *self._sharing.values()):
            if backend is not None:
                backend.abort() if self.device.type == "cuda" else backend.shutdown()
        self._backend, self._sharing = None, {}  # gloo's connections last as long as the objects

    @contextmanager
    def _ending(self, works: list[Any]) -> Iterator[None]:
        """Wait for all works that begin in the block, and keep none: gloo's connections last as long as these."""
        try:
            yield
            while works:
                works.pop(0).wait(self._timeout)
        except RuntimeError as error:
            works.clear()
            raise WorkerError(f"refit: channel shards: another rank is lost, or late: {error}") from error

    def _plans(self, number: int, plan: str) -> list[str]:
        self._store.set(f"plan-{number}-{self.rank}", plan)
        keys = [f"plan-{number}-{rank}" for rank in range(self.world_size)]
        return [each.decode() for each in self._store.multi_get(keys)]

    def _connected(self, name: str, ranks: Sequence[int]) -> Any:
        store = PrefixStore(name, self._store)
        return _backend(store, ranks.index(self.rank), len(ranks), self.device, self._timeout)

    def _late(self, error: RuntimeError) -> WorkerError:
        return WorkerError(f"refit: channel shards: a rank did not come to {self._within}: {error}")


def _require_one(plans: Sequence[str]) -> None:
    refused = [f"rank {rank}: {plan[1:]}" for rank, plan in enumerate(plans) if plan.startswith(_REFUSED)]
    differing = [f"rank {rank}" for rank, plan in enumerate(plans) if plan != plans[0]]
    if refused:
        raise RefitError(f"refit: no plan of shards on {listed(refused, 3)}")
    if differing:
        raise RefitError(
            f"refit: {listed(differing, 5)} planned other pieces than rank 0; expected one plan. Install one version of rlcore "
            "on all nodes"
        )


def _backend(store: Any, rank: int, world_size: int, device: torch.device, timeout: timedelta) -> Any:
    if device.type == "cpu":
        return dist.ProcessGroupGloo(store, rank, world_size, timeout)
    # Multicast over NVLink is left off: where fabric and driver disagree about it, communicators hang.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout + _KEPT_BY_NCCL
    with _errors_raised():
        backend = dist.ProcessGroupNCCL(store, rank, world_size, options)
    # All at once and now: a window has parts for some ranks alone, and NCCL would wait for the others at their first exchange.
    backend.eager_connect_single_device(device)
    return backend


@contextmanager
def _errors_raised() -> Iterator[None]:
    """Have a group that is made in the block raise where a rank is lost; torch would end the process instead."""
    kept = {name: os.environ.get(name) for name in _WATCH}
    os.environ.update(_WATCH)
    try:
        yield
    finally:
        for name, value in kept.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
