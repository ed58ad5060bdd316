"""Reserving devices of a Ray cluster, and saying what it has where it has too few."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal

from rlcore.spi import ConfigError, Problem
from rlcore_ray.config import RayConfig

RESERVE_S = 10.0
"""Most seconds for Ray to reserve what is free, the devices of workers just ended included."""
POLL_S = 0.5


@contextmanager
def reserved(cluster: RayConfig, device: Literal["cpu", "cuda"]) -> Iterator[Any]:
    """A placement group with one bundle a node. ConfigError where the cluster has too little, also after `wait_s`."""
    import ray

    kind: Literal["CPU", "GPU"] = "GPU" if device == "cuda" else "CPU"
    deadline = time.monotonic() + cluster.wait_s
    while sum(_holds(node, cluster, kind) for node in _nodes()) < cluster.nodes:  # those that are large enough, free or not
        if time.monotonic() >= deadline:
            raise _too_little(cluster, kind, "")
        time.sleep(POLL_S)
    bundle = {"CPU": float(cluster.gpus_per_node)}
    if kind == "GPU":
        bundle["GPU"] = float(cluster.gpus_per_node)
    strategy = "STRICT_SPREAD" if cluster.nodes > 1 else "STRICT_PACK"
    group = ray.util.placement_group([dict(bundle) for _ in range(cluster.nodes)], strategy=strategy)
    try:
        if not group.wait(max(RESERVE_S, deadline - time.monotonic())):
            free = ray.available_resources().get(kind, 0)  # type: ignore[no-untyped-call]
            others = "others use the rest, or a node is about to leave"
            raise _too_little(cluster, kind, f", of which {free:g} {kind}s are free; {others}")
        yield group
    finally:
        with suppress(Exception):  # a cluster that is gone holds nothing any more
            ray.util.remove_placement_group(group)


def _holds(node: Any, cluster: RayConfig, kind: str) -> bool:
    wanted = cluster.gpus_per_node
    return bool(node["Resources"].get(kind, 0) >= wanted and node["Resources"].get("CPU", 0) >= wanted)


def _nodes() -> Sequence[Any]:
    import ray

    return [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]


def _too_little(cluster: RayConfig, kind: str, more: str) -> ConfigError:
    nodes = [_described(node, kind) for node in _nodes()]
    enough = sum(_holds(node, cluster, kind) for node in _nodes())
    many = cluster.gpus_per_node
    per_node = f"{many} {kind}{'s' if many > 1 else ''}" + (f" and {many} CPUs" if kind == "GPU" else "")
    waited = f", also after {cluster.wait_s:g} s" if cluster.wait_s else ""
    return ConfigError(
        [
            Problem(
                path="cluster.nodes" if 0 < enough < cluster.nodes else "cluster.gpus_per_node",
                found=f"{cluster.nodes} node(s) with {per_node} each",
                expected=f"no more than the cluster has{waited}: {'; '.join(nodes) or 'no node at all'}{more}",
                remedy="Ask for less, add nodes, or set cluster.wait_s to wait for them.",
            )
        ]
    )


def _described(node: Any, kind: str) -> str:
    kinds = ("CPU",) if kind == "CPU" else ("GPU", "CPU")
    has = " and ".join(f"{node['Resources'].get(name, 0):g} {name}s" for name in kinds)
    return f"node {node['NodeManagerAddress']} with {has}"
