"""Which engines take part again after a refit, whatever happens to them beside it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlcore.spi import ExportWeightsRequest
from rlcore.spi.execution import RefitCommand
from rlcore_ray.commands import RefittedRank
from rlcore_ray.config import RayConfig
from rlcore_ray.engines import Engines
from rlcore_ray.failures import WorkerInfo
from rlcore_ray.pool_groups import PoolRoute

from .conftest import Notes  # type: ignore[import-not-found]

ORDER = RefitCommand(
    export=ExportWeightsRequest(weight_version=3, dtype="float32", max_bucket_bytes=64), channel="fake", may_alias=False
)


@pytest.fixture
def route() -> PoolRoute:
    """Of two ranks that refit, and of which the first does something before the driver has their answers."""
    refitted = RefittedRank(digests={"a": 1}, drafts=None)
    calls: Any = SimpleNamespace(
        cluster=RayConfig(),
        progress=Notes(),
        is_usable=True,
        workers=[WorkerInfo(rank=rank, log_file=Path("none")) for rank in range(2)],
        values=lambda outcomes: list(outcomes.values()),
        meanwhile=lambda: None,
    )

    def outcomes(name: str, order: RefitCommand, publishes: bool, *, limit_s: float | None) -> dict[int, RefittedRank]:
        assert (name, order.export.weight_version, publishes) == ("refit", 3, False)
        calls.meanwhile()
        return {0: refitted, 1: refitted}

    calls.outcomes = outcomes
    return PoolRoute(calls=calls, engines=Engines(calls, [0, 1]))


class Stream:
    """Whom it takes back."""

    def __init__(self) -> None:
        self.back: list[tuple[int, int]] = []

    def rejoin(self, rank: int, weight_version: int) -> None:
        self.back.append((rank, weight_version))


@pytest.mark.parametrize(
    ("before", "beside", "living", "back"),
    [
        (set(), {1}, [0], []),
        ({1}, set(), [0, 1], [(1, 3)]),
        ({0}, {1}, [0], [(0, 3)]),
    ],
    ids=["dies-after-its-own-refit", "comes-back", "one-each"],
)
def test_only_an_engine_that_was_out_before_comes_back(
    route: PoolRoute, before: set[int], beside: set[int], living: list[int], back: list[tuple[int, int]]
) -> None:
    calls: Any = route.calls

    def take_out(ranks: set[int]) -> None:
        for rank in ranks:
            route.engines.take_out(rank)

    take_out(before)
    calls.meanwhile = lambda: take_out(beside)  # as the thread does that collects its samples
    stream = Stream()
    with route.engines.streaming(stream):
        route.sync_weights(ORDER)
    assert (route.engines.living, stream.back) == (living, back)
    assert route.engines.take_restarts() == len(back)
