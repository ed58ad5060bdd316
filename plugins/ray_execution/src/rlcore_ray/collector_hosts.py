"""Starts the processes that collect samples beside a pool's engines, and carries their messages."""

import threading
from collections.abc import Sequence
from contextlib import suppress
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

from attrs import define, field, frozen

from rlcore.spi import WorkerError
from rlcore_ray.calls import COLLECT, Calls, Rank
from rlcore_ray.commands import WorkerEnv
from rlcore_ray.config import RayConfig
from rlcore_ray.engines import Engines
from rlcore_ray.failures import PoolName, Reply
from rlcore_workers.logged_process import last_lines

REJOIN = "rejoin"
"""The concurrency group of what a collector answers while it carries out commands."""
CLOSE_S = 10.0


@frozen(kw_only=True, eq=False)
class CollectorOrder:
    """The parts that a process collects with."""

    make: bytes
    """Pickled: builds the collector, given a generator, the collector's number and the number of all."""
    number: int
    num_collectors: int
    ranks: Sequence[Rank]
    """All ranks of the pool."""
    hosts: Sequence[int]
    """The ranks whose engines it feeds."""
    beside: Sequence[tuple[PoolName, Sequence[Rank]]]
    """Other pools, whose ranks its stream watches over too."""
    cluster: RayConfig
    capabilities: frozenset[str]
    surroundings: WorkerEnv


@frozen(kw_only=True, eq=False)
class Sent:
    """Messages of a collector since the last call."""

    messages: Sequence[Any]
    notes: Sequence[str]
    """Warnings of its stream."""
    failed: Sequence[int]
    """Ranks whose engines have failed in it."""
    lost: str | None
    """The reason why no rank can be used any more; None where they can."""


@frozen(kw_only=True, eq=False)
class CollectorPlaces:
    """Places of a pool's collectors, and the engines that each feeds."""

    group: Any
    """Ray's placement group."""
    logs: Path
    parts: Sequence[Sequence[int]]
    """The ranks with a generator that each collector feeds."""
    surroundings: Sequence[WorkerEnv]
    """The process around each."""

    @classmethod
    def of(cls, calls: Calls, hosts: Sequence[int], group: Any, logs: Path, around: Sequence[WorkerEnv]) -> "CollectorPlaces":
        """Divide the ranks with a generator, in order; `around` are the processes around all ranks."""
        nodes, wanted = [calls.workers[rank].node_id for rank in hosts], calls.cluster.collectors
        if wanted == "auto":
            parts = [[rank for rank, _ in found] for _, found in groupby(zip(hosts, nodes, strict=True), itemgetter(1))]
        else:
            bounds = [place * len(hosts) // wanted for place in range(wanted + 1)]
            parts = [part for first, end in pairwise(bounds) if (part := list(hosts[first:end]))]
            if len(parts) < wanted:
                calls.progress.note(f"cluster.collectors: {len(parts)} of {wanted} are started, one for each engine")
        return cls(group=group, logs=logs, parts=parts, surroundings=[around[part[0]] for part in parts])


@define(eq=False)
class HostedCollector:
    """One process that collects, as the driver reaches it."""

    calls: Calls
    engines: Engines
    hosts: Sequence[int]
    actor: Any
    name: str
    log_file: Path
    _sending: threading.Lock = field(factory=threading.Lock, init=False)
    """Held while something is sent that says which engines are out, in the order in which they are."""
    _num_sent: int = field(default=0, init=False)
    """Numbers what is sent: Ray carries out what is of different groups in any order."""

    def send(self, commands: Sequence[Any]) -> None:
        """Hand the collector commands, in order, without waiting."""
        with self._sending:
            out = frozenset(self.hosts) - {*self.engines.living}
            self._num_sent += 1
            self.actor.take.remote(commands, out, self._num_sent)

    def receive(self) -> Sequence[Any]:
        """Return what the collector has sent, once there is something or a second has passed. WorkerError where it has died, or
        does not answer."""
        import ray

        limit_s = self.calls.cluster.straggler_timeout_s
        try:
            sent: Sent = ray.get(self.actor.collect.options(concurrency_group=COLLECT).remote(), timeout=limit_s)
        except ray.exceptions.GetTimeoutError:
            raise self._lost(f"did not answer within {limit_s:g} s (cluster.straggler_timeout_s)") from None
        except ray.exceptions.RayError as error:
            reason = str(error).splitlines()[0]
            raise self._lost(f"died: {reason}") from None
        for text in sent.notes:
            self.calls.progress.note(text)
        for rank in sent.failed:
            self.engines.take_out(rank)
        if sent.lost is not None:
            self.calls.lose(sent.lost)
        return sent.messages

    def rejoin(self, rank: int, weight_version: int) -> None:
        """See Rejoins."""
        if rank in self.hosts:
            with self._sending:
                self._num_sent += 1
                self.actor.rejoin.options(concurrency_group=REJOIN).remote(rank, weight_version, self._num_sent)

    def close(self) -> None:
        """End the process, unless it has ended with the ranks."""
        import ray

        if self.calls.lost is not None:
            return
        with suppress(Exception):
            ray.get(self.actor.close.remote(), timeout=CLOSE_S)
        with suppress(Exception):
            ray.kill(self.actor)

    def _lost(self, what: str) -> WorkerError:
        """Give the ranks up: all workers start anew, and the groups of this process begin again."""
        reason = f"{self.name} {what}. {last_lines(self.log_file)}"
        if self.calls.lost is None:  # else it was ended with the ranks
            self.calls.lose(reason)
        return WorkerError(reason)


def start_collectors(
    places: CollectorPlaces, engines: Engines, beside: Sequence[Calls], capabilities: frozenset[str], make: object
) -> list[HostedCollector]:
    """Start a process for each part of the engines, beside them. The first one's stream watches over all ranks, also of the
    pools `beside` theirs."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    from rlcore_ray.collector_actor import CollectorActor

    calls = engines.calls
    pickled: bytes = ray.cloudpickle.dumps(make)  # type: ignore[no-untyped-call]
    actor: Any = ray.remote(concurrency_groups={COLLECT: 1, REJOIN: 1})(CollectorActor)  # type: ignore[call-overload]
    started: list[HostedCollector] = []
    for number, part in enumerate(places.parts):
        node = part[0] // calls.cluster.ranks_per_node
        log_file = places.logs / f"collector-{number}.log"
        strategy = PlacementGroupSchedulingStrategy(places.group, placement_group_bundle_index=node)
        handle = actor.options(num_cpus=0, scheduling_strategy=strategy).remote(log_file)
        calls.attach(handle)
        name = f"collector {number} (node {calls.workers[part[0]].node})"
        started.append(HostedCollector(calls, engines, part, handle, name, log_file))
    orders = [
        CollectorOrder(
            make=pickled,
            number=number,
            num_collectors=len(places.parts),
            ranks=calls.ranks,
            hosts=part,
            beside=[(other.pool, other.ranks) for other in beside] if number == 0 else (),
            cluster=calls.cluster,
            capabilities=capabilities,
            surroundings=places.surroundings[number],
        )
        for number, part in enumerate(places.parts)
    ]
    asked = [one.actor.start.remote(order) for one, order in zip(started, orders, strict=True)]
    for one, reference in zip(started, asked, strict=True):
        try:
            reply: Reply = ray.get(reference, timeout=calls.cluster.start_timeout_s)
        except ray.exceptions.RayError as error:
            reason = f"{one.name} did not start: {str(error).splitlines()[0]}. {last_lines(one.log_file)}"
            calls.lose(reason)
            raise WorkerError(reason) from None
        if reply.error is not None:
            raised = reply.error.restore()
            raised.add_note(f"raised in {one.name}. {reply.error.last_lines}")
            raise raised
        engines.follow(one)
    return started
