"""Parts from the trainer's ranks to the engines', by NCCL or gloo: no trainer rank gathers a tensor that it can send a part of.

Each rank of an engine takes tensors, a window of them at a time: at first whole ones, from which vLLM's own loaders cut what it
needs, and once it is known what is read of them those parts alone. The ranks of all engines that read a part share one copy of
what the trainer's send, and pass it on among themselves.
"""

import secrets
import socket
from collections.abc import Callable, Sequence, Set
from datetime import timedelta
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from rlcore.spi import (
    ChannelReceiver,
    ReceivedBucket,
    ReceiverRank,
    RefitError,
    ShardExport,
    ShardRoute,
    ShardSlice,
    TensorSpec,
)
from rlcore_torchkit.distributed.process_group import is_loopback, listening_store
from rlcore_torchkit.refit.copies import copy_each
from rlcore_torchkit.refit.shard_cache import ShardCache
from rlcore_torchkit.refit.shard_receiver import ShardReceiver
from rlcore_torchkit.refit.shard_slices import add_unwanted, whole_slice
from rlcore_vllm.channels.manifest import Manifest

Needs: TypeAlias = dict[str, list[list[list[int]]]]
"""Parts of tensors that a rank reads, as plain containers: [start, stop] of each slice by tensor. Others are read whole."""
Held: TypeAlias = tuple[tuple[ShardSlice, ...], ...]
"""The parts that each of the trainer's ranks holds."""
LoadParts: TypeAlias = Callable[[dict[str, Tensor], Set[str]], None]
"""Loads tensors. Of those that are named beside them only the parts that were needed hold values."""
_LOOPBACK = "127.0.0.1"


class Route:
    """The driver's side: the store in which the ranks meet, and what each rank of an engine has to know."""

    def __init__(self, ranks: Sequence[ReceiverRank], host: str, timeout_s: float) -> None:
        self.ranks, self._timeout_s = ranks, timeout_s
        self._store: TCPStore = listening_store(host, 0, None, timedelta(seconds=timeout_s), wait_for_workers=False)
        self._address = f"{host}:{self._store.port}"
        self._key = secrets.token_hex(8)
        """The name of its routes: to a trainer that knows one, a later one by the same port is another."""
        self._routes: dict[tuple[TensorSpec, ...], tuple[list[Needs], ShardRoute]] = {}
        """The parts that the ranks named last for the tensors of each kind of refit, and the last route of these: adapters may
        travel alone."""
        self._held: dict[tuple[TensorSpec, ...], Held] = {}
        """The parts of the trainer's ranks, as the engines were told for each kind of refit."""

    def to(self, specs: tuple[TensorSpec, ...], told: Sequence[Needs | None]) -> ShardRoute:
        """Return the route to every rank for the parts that each needs, None standing for those of the last such refit; one
        rank also takes what none needs. All routes have one name, and so one process group."""
        known, last = self._routes.get(specs, ([{} for _ in self.ranks], None))
        needs = [before if now is None else now for before, now in zip(known, told, strict=True)]
        if last is not None and needs == known:
            return last
        route = ShardRoute(
            address=self._address,
            name=self._key,
            wanted=add_unwanted(specs, _wanted_by_each(specs, needs)),
            timeout_s=self._timeout_s,
        )
        self._routes[specs] = needs, route
        return route

    def options(self, shards: ShardExport) -> list[dict[str, Any]]:
        """Return the options of each replica's receivers, in plain containers."""
        replicas = [rank.replica for rank in self.ranks]
        shared = {
            "address": self._address,
            "name": self._key,
            "max_bucket_bytes": shards.max_bucket_bytes,
            "timeout_s": self._timeout_s,
        }
        return [shared | {"first_receiver": replicas.index(replica)} for replica in dict.fromkeys(replicas)]

    def layout(self, specs: tuple[TensorSpec, ...], shards: ShardExport) -> dict[str, Any]:
        """Return the beginning of a refit, in plain containers: whether changes alone may come and, where the engines do not
        know it, what each of the trainer's ranks holds."""
        content: dict[str, Any] = {"delta": shards.delta}
        if self._held.get(specs) != shards.held:
            self._held[specs] = shards.held
            content["held"] = [[[box.name, list(box.start), list(box.stop)] for box in boxes] for boxes in shards.held]
        return content


class Receiver(ChannelReceiver):
    """One rank of an engine."""

    def __init__(self, device: torch.device, rank: int, options: dict[str, Any]) -> None:
        super().__init__(device, rank, options)
        self._receiver: ShardReceiver | None = None
        self._held: list[tuple[tuple[TensorSpec, ...], Held]] = []
        """The parts of the trainer's ranks, of each kind of refit."""
        self._kept: tuple[tuple[tuple[TensorSpec, ...], str], ShardCache] | None = None
        """The parts that were taken last, of which tensors, and where they are."""
        self.received_bytes = 0
        """Bytes that the last `take_shards` brought."""

    def receive(self, where: dict[str, Any], specs: Sequence[TensorSpec]) -> ReceivedBucket:  # noqa: ARG002
        raise RefitError("refit: found a bucket of whole tensors by the channel shards; expected parts")

    def take_shards(self, manifest: Manifest, layout: dict[str, Any], load: LoadParts, only_changed: bool) -> int:
        """Receive what the ranks of a sharded export send, and have it loaded; returns the sum of its digests. `layout` says
        whether changes alone may come and, where that is new, what the trainer's ranks hold; with `only_changed` what is known
        not to have changed need not be loaded."""
        if self._receiver is None:
            self._receiver = self._connected()
        digest = self._receiver.take(
            manifest.specs,
            self._held_of(manifest.specs, layout),
            lambda parts: load(*_assembled(parts)),
            kept=self._kept_of(manifest.specs, layout["delta"]),
            weight_version=manifest.weight_version,
            only_changed=only_changed,
        )
        self.received_bytes = self._receiver.received_bytes
        return digest

    def close(self) -> None:
        self._kept = None
        if self._receiver is not None:
            self._receiver.close()
        self._receiver, self._held = None, []

    def _connected(self) -> ShardReceiver:
        options = self.options
        # The trainer's ranks tell what each rank wants, with each new plan.
        route = ShardRoute(address=options["address"], name=options["name"], wanted=(), timeout_s=options["timeout_s"])
        place = options["first_receiver"] + self.rank
        return ShardReceiver(route=route, place=place, max_bytes=options["max_bucket_bytes"], device=self.device)

    def _held_of(self, specs: tuple[TensorSpec, ...], layout: dict[str, Any]) -> Held:
        """Return what the trainer's ranks hold of these tensors, as the layout says it or an earlier one did."""
        if "held" in layout:
            held = tuple(
                tuple(ShardSlice(tensor, tuple(start), tuple(stop)) for tensor, start, stop in boxes)
                for boxes in layout["held"]
            )
            self._held = [*(each for each in self._held if each[0] != specs), (specs, held)]
        return next(held for known, held in self._held if known == specs)

    def _kept_of(self, specs: tuple[TensorSpec, ...], where: str) -> ShardCache | None:
        """Return the copies of these tensors' parts; those of others are given up. None where changes are not asked for."""
        if where == "off":
            self._kept = None
            return None
        kind = specs, where
        if self._kept is None or self._kept[0] != kind:
            self._kept = kind, ShardCache(self.device if where == "device" else torch.device("cpu"))
        return self._kept[1]


def _wanted_by_each(specs: Sequence[TensorSpec], needs: Sequence[Needs]) -> list[list[ShardSlice]]:
    """The parts that each rank wants, in one list for ranks that need the same, as those of several engines do."""
    firsts = [needs.index(each) for each in needs]
    wanted = {first: _wanted(specs, needs[first]) for first in dict.fromkeys(firsts)}
    return [wanted[first] for first in firsts]


def _wanted(specs: Sequence[TensorSpec], needs: Needs) -> list[ShardSlice]:
    found = list[ShardSlice]()
    for spec in specs:
        parts = needs.get(spec.name)
        if parts is None:
            found.append(whole_slice(spec))
        else:
            found += [ShardSlice(spec.name, tuple(start), tuple(stop)) for start, stop in parts]
    return found


def _assembled(parts: Sequence[tuple[TensorSpec, ShardSlice, Tensor]]) -> tuple[dict[str, Tensor], set[str]]:
    """Tensors of their full shapes, and the names of those of which other parts hold any values."""
    tensors, missing = dict[str, Tensor](), dict[str, int]()
    places, copied = list[Tensor](), list[Tensor]()
    for spec, box, part in parts:
        if part.shape == spec.shape:
            tensors[spec.name] = part
            continue
        whole = tensors.get(spec.name)
        if whole is None:
            whole = tensors[spec.name] = part.new_empty(spec.shape)
            missing[spec.name] = whole.numel()
        places.append(whole[tuple(map(slice, box.start, box.stop))])
        copied.append(part)
        missing[spec.name] -= part.numel()
    copy_each(places, copied)
    return tensors, {name for name, num_elements in missing.items() if num_elements}


def meeting_host(ranks: Sequence[ReceiverRank], rendezvous: str | None) -> str:
    """The address at which the trainer's ranks, who met at `rendezvous`, and the engines' reach this machine."""
    met = None if rendezvous is None else urlsplit(rendezvous).hostname
    if (met is None or is_loopback(met)) and all(rank.host == socket.gethostname() for rank in ranks):
        return _LOOPBACK
    from vllm.utils.network_utils import get_ip

    return str(get_ip())
