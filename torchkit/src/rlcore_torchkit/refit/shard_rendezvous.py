"""The rendezvous of a refit by shards: generators of several trainer ranks join one process group with the trainer.

A generator knows only its own ranks. Before each refit, its trainer rank publishes an announcement in the store of the
generator's own route: the group, the plan, and the number of the generator's first rank in the group. It publishes the common
route with each plan that is new.
"""

import hashlib
import json
import zlib
from collections.abc import Sequence
from datetime import timedelta
from itertools import accumulate, chain

from attrs import astuple, frozen
from torch._C._distributed_c10d import PrefixStore, TCPStore

from rlcore.spi import ShardRoute, WorkerError
from rlcore.spi.weights import ShardSlice
from rlcore_torchkit.distributed.process_group import is_loopback

VALUE_BYTES = 2**22
"""Most bytes of a value in the store, which takes no more than 8 MiB."""


def common_route(routes: Sequence[ShardRoute], number: int) -> ShardRoute:
    """Join routes to one that reaches the ranks of all, in their order.

    `number` counts the groups that these routes have made. Each has its own name; the first group of a single route is the
    route itself.
    """
    if len(routes) == 1 and number == 1:
        return routes[0]
    names = repr([number, *((route.address, route.name) for route in routes)])
    reached = [route for route in routes if not is_loopback(_host(route))] or routes
    return ShardRoute(
        address=reached[0].address,
        name=hashlib.sha256(names.encode()).hexdigest()[:16],
        wanted=tuple(chain.from_iterable(route.wanted for route in routes)),
        timeout_s=max(route.timeout_s for route in routes),
    )


def first_ranks(routes: Sequence[ShardRoute]) -> list[int]:
    """Return the number of each route's first rank among the ranks of all routes."""
    return [0, *accumulate(len(route.wanted) for route in routes)][: len(routes)]


@frozen
class RefitAnnouncement:
    """The announcement of one refit."""

    group: str
    """The name of the common route."""
    plan: int
    """The number of the plan in the group."""
    first: int
    """The number of the generator's first rank, among the ranks of all generators."""


class Rendezvous:
    """Publishes or reads the announcement of each refit, in the store of one route."""

    def __init__(self, route: ShardRoute) -> None:
        """WorkerError where the store is not there."""
        self._route, self._number = route, 0
        self._told = set[str]()
        """The keys of the common routes that are published."""
        timeout = timedelta(seconds=route.timeout_s)
        try:
            store = TCPStore(_host(route), int(route.address.rpartition(":")[2]), None, False, timeout, wait_for_workers=False)
        except RuntimeError as error:
            raise self._lost(error) from error
        self._store = PrefixStore(f"notices-{route.name}", store)

    def tell(self, common: ShardRoute, announcement: RefitAnnouncement) -> None:
        """Publish a refit, and its common route if the plan is new. Called once for each refit."""
        key = _key(announcement)
        try:
            if key not in self._told:
                self._put(key, zlib.compress(_written(common).encode(), 1))
            self._store.set(str(self._number), json.dumps(astuple(announcement)))
        except RuntimeError as error:
            raise self._lost(error) from error
        self._told.add(key)
        self._number += 1

    def hear(self) -> RefitAnnouncement:
        """Wait for the announcement of the next refit."""
        try:
            announcement = RefitAnnouncement(*json.loads(self._store.get(str(self._number))))
        except RuntimeError as error:
            raise self._lost(error) from error
        self._number += 1
        return announcement

    def route(self, announcement: RefitAnnouncement) -> ShardRoute:
        """Read the common route of an announcement."""
        try:
            return _read(zlib.decompress(self._taken(_key(announcement))).decode())
        except RuntimeError as error:
            raise self._lost(error) from error

    def _put(self, key: str, content: bytes) -> None:
        starts = range(0, len(content), VALUE_BYTES)
        for number, start in enumerate(starts):
            self._store.set(f"{key}/{number}", content[start : start + VALUE_BYTES])  # type: ignore[arg-type]
        self._store.set(key, str(len(starts)))

    def _taken(self, key: str) -> bytes:
        return b"".join(self._store.get(f"{key}/{number}") for number in range(int(self._store.get(key))))

    def _lost(self, error: RuntimeError) -> WorkerError:
        at = f"{self._route.address} in {self._route.timeout_s:g} s"
        return WorkerError(f"refit: channel shards: no word of the refit at {at}: {error}")


def _key(announcement: RefitAnnouncement) -> str:
    return f"{announcement.group}@{announcement.plan}"


def _host(route: ShardRoute) -> str:
    return route.address.rpartition(":")[0]


def _written(route: ShardRoute) -> str:
    """Return a route as JSON, which holds equal wanted parts of several ranks once."""
    kinds = list(dict.fromkeys(route.wanted))
    number_of = {wanted: number for number, wanted in enumerate(kinds)}
    return json.dumps(
        {
            "address": route.address,
            "name": route.name,
            "timeout_s": route.timeout_s,
            "kinds": [[[box.name, box.start, box.stop] for box in wanted] for wanted in kinds],
            "wanted": [number_of[wanted] for wanted in route.wanted],
        }
    )


def _read(text: str) -> ShardRoute:
    content = json.loads(text)
    kinds = [tuple(ShardSlice(name, tuple(start), tuple(stop)) for name, start, stop in wanted) for wanted in content["kinds"]]
    wanted = tuple(kinds[number] for number in content["wanted"])
    return ShardRoute(address=content["address"], name=content["name"], wanted=wanted, timeout_s=content["timeout_s"])
