"""Trainer and generator in threads of one process, each with its end of a route."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from rlcore.spi import ExportWeightsRequest, ShardRoute, ShardSlice, TensorSpec
from rlcore_torchkit.distributed.process_group import listening_store
from rlcore_torchkit.refit.shard_group import ProcessShardGroup
from rlcore_torchkit.refit.shard_route import ShardEnd

CPU = torch.device("cpu")
SPECS = tuple(TensorSpec(name=name, shape=(6, 4), dtype="float32") for name in ("a", "b", "c"))
WHOLE = tuple(ShardSlice(spec.name, (0, 0), spec.shape) for spec in SPECS)
MAX_BYTES = 2 * 6 * 4 * 4
"""Two windows: the last tensor has one of its own."""
REQUEST = ExportWeightsRequest(weight_version=3, dtype="float32", max_bucket_bytes=MAX_BYTES, sharded=True)


def store(timeout_s: float = 30.0) -> TCPStore:
    return listening_store("127.0.0.1", 0, None, timedelta(seconds=timeout_s), wait_for_workers=False)


def route_in(at: TCPStore, wanted: Sequence[Sequence[ShardSlice]] = (WHOLE,), **changes: Any) -> ShardRoute:
    content = {"name": "engines", "timeout_s": 30.0, "wanted": tuple(map(tuple, wanted))}
    return ShardRoute(address=f"127.0.0.1:{at.port}", **(content | changes))


def group_in(route: ShardRoute, rank: int, world_size: int) -> ProcessShardGroup:
    return ProcessShardGroup(route, rank, world_size, CPU)


def end_of(
    route: ShardRoute,
    held: Sequence[Sequence[ShardSlice]],
    specs: Sequence[TensorSpec] = SPECS,
    *,
    rank: int | None = None,
    max_bytes: int = MAX_BYTES,
) -> ShardEnd:
    """The end of the first plan in a group of its own; of the first receiver unless a rank is named."""
    group = group_in(route, len(held) if rank is None else rank, len(held) + len(route.wanted))
    return ShardEnd(specs=specs, held=held, wanted=route.wanted, group=group, number=1, max_bytes=max_bytes)


def together(*calls: Callable[[], Any]) -> list[Any]:
    """What each returns or raises."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.exception() or future.result() for future in [pool.submit(call) for call in calls]]
