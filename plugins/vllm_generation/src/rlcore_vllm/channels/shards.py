"""Parts from the trainer's ranks to the engines', by NCCL or gloo: no trainer rank gathers a tensor that it can send a part of.

Each rank of an engine takes whole tensors, a window of them at a time, from which vLLM's own loaders cut what it needs. The
ranks of all engines share one copy of what the trainer's send, and pass it on among themselves.
"""

import hashlib
import secrets
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from rlcore.spi import Box, RefitError, ShardExport, ShardRoute, TensorSpec
from rlcore_torchkit.kept_parts import KeptParts
from rlcore_torchkit.process_group import is_loopback, listening_store
from rlcore_torchkit.shard_receiver import ShardReceiver
from rlcore_torchkit.shard_route import whole_box
from rlcore_vllm.channels import channel
from rlcore_vllm.channels.channel import EngineRank, Received
from rlcore_vllm.manifest import Manifest

_LOOPBACK = "127.0.0.1"


class Route:
    """The driver's side: the store in which the ranks meet, and what each rank of an engine has to know."""

    def __init__(self, ranks: Sequence[EngineRank], host: str, timeout_s: float) -> None:
        self.ranks, self._timeout_s = ranks, timeout_s
        self._store: TCPStore = listening_store(host, 0, None, timedelta(seconds=timeout_s), wait_for_workers=False)
        self._address = f"{host}:{self._store.port}"
        self._key = secrets.token_hex(8)
        """In the names of its groups: to a trainer that knows them, a later route by the same port is another one."""
        self._planned: set[str] = set()

    def to(self, specs: Sequence[TensorSpec]) -> ShardRoute:
        """The whole of every tensor to every rank."""
        wanted = tuple(map(whole_box, specs))
        return ShardRoute(
            address=self._address,
            name=_name(self._key, specs),
            wanted=(wanted,) * len(self.ranks),
            timeout_s=self._timeout_s,
        )

    def options(self, shards: ShardExport) -> list[dict[str, Any]]:
        """What the receivers of each replica are made with, in plain containers."""
        replicas = [rank.replica for rank in self.ranks]
        shared = {
            "address": self._address,
            "key": self._key,
            "num_receivers": len(self.ranks),
            "max_bucket_bytes": shards.max_bucket_bytes,
            "timeout_s": self._timeout_s,
        }
        return [shared | {"first_receiver": replicas.index(replica)} for replica in dict.fromkeys(replicas)]

    def layout(self, specs: Sequence[TensorSpec], shards: ShardExport) -> dict[str, Any]:
        """What a refit with these tensors begins with, in plain containers: whether changes alone may come and, the first time,
        where they come from."""
        name = _name(self._key, specs)
        if name in self._planned:
            return {"delta": shards.delta}
        self._planned.add(name)
        held = [[[box.name, list(box.start), list(box.stop)] for box in boxes] for boxes in shards.held]
        return {"delta": shards.delta, "held": held}


class Receiver(channel.Receiver):
    """One rank of an engine."""

    def __init__(self, device: torch.device, rank: int, options: dict[str, Any]) -> None:
        super().__init__(device, rank, options)
        self._routes: dict[str, ShardReceiver] = {}
        self._kept: tuple[tuple[str, str], KeptParts] | None = None
        """What has been taken last, by which group, and where it is."""

    def receive(self, where: dict[str, Any], specs: Sequence[TensorSpec]) -> Received:  # noqa: ARG002
        raise RefitError("refit: found a bucket of whole tensors by the channel shards; expected parts")

    def take_shards(
        self, manifest: Manifest, layout: dict[str, Any], load: Callable[[dict[str, Tensor]], None], only_changed: bool
    ) -> int:
        specs = manifest.specs
        return self._by_route(specs, layout).take(
            lambda parts: load({spec.name: tensor for spec, _, tensor in parts}),
            kept=self._kept_of(specs, layout["delta"]),
            weight_version=manifest.weight_version,
            only_changed=only_changed,
        )

    def close(self) -> None:
        self._kept = None
        for receiver in self._routes.values():
            receiver.close()
        self._routes = {}

    def _kept_of(self, specs: Sequence[TensorSpec], where: str) -> KeptParts | None:
        """Copies of such tensors; those of others are given up. None where changes are not asked for."""
        if where == "off":
            self._kept = None
            return None
        plan = _name(self.options["key"], specs), where
        if self._kept is None or self._kept[0] != plan:
            self._kept = plan, KeptParts(self.device if where == "device" else torch.device("cpu"))
        return self._kept[1]

    def _by_route(self, specs: Sequence[TensorSpec], layout: dict[str, Any]) -> ShardReceiver:
        name = _name(self.options["key"], specs)
        if name not in self._routes:
            options, wanted = self.options, tuple(map(whole_box, specs))
            self._routes[name] = ShardReceiver(
                specs=specs,
                held=[[Box(tensor, tuple(start), tuple(stop)) for tensor, start, stop in boxes] for boxes in layout["held"]],
                route=ShardRoute(
                    address=options["address"],
                    name=name,
                    wanted=(wanted,) * options["num_receivers"],
                    timeout_s=options["timeout_s"],
                ),
                place=options["first_receiver"] + self.rank,
                max_bytes=options["max_bucket_bytes"],
                device=self.device,
            )
        return self._routes[name]


def _name(key: str, specs: Sequence[TensorSpec]) -> str:
    """Names the group of a route that sends these: adapters that travel alone have another than the model before them."""
    announced = [key, *((spec.name, spec.shape, spec.dtype) for spec in specs)]
    return hashlib.sha256(repr(announced).encode()).hexdigest()[:16]


def meeting_host(ranks: Sequence[EngineRank], rendezvous: str | None) -> str:
    """The address at which the trainer's ranks, who met at `rendezvous`, and the engines' reach this machine."""
    met = None if rendezvous is None else urlsplit(rendezvous).hostname
    if (met is None or is_loopback(met)) and all(rank.host == socket.gethostname() for rank in ranks):
        return _LOOPBACK
    from vllm.utils.network_utils import get_ip

    return str(get_ip())
