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
def reserved(cluster: RayConfig, device: Literal["cpu", "cuda"]) -> Iterator[tuple[Any, int]]:
    """Yield a placement group with one bundle a node, and the number of nodes: `cluster.nodes`, or after `wait_s` as many as
    there are, at least `min_nodes`. ConfigError where the cluster has too little."""
    import ray

    kind: Literal["CPU", "GPU"] = "GPU" if device == "cuda" else "CPU"
    deadline = time.monotonic() + cluster.wait_s
    while (large := _num_large(cluster, kind)) < cluster.nodes and time.monotonic() < deadline:
        time.sleep(POLL_S)
    fewest = cluster.min_nodes or cluster.nodes
    if large < fewest:
        raise _too_little(cluster, kind, "")
    group, nodes = None, min(large, cluster.nodes)
    while group is None and nodes >= fewest:  # one that is about to leave is still among them
        group = _placed(cluster, kind, nodes, max(RESERVE_S, deadline - time.monotonic()))
        nodes -= group is None
    if group is None:
        free = ray.available_resources().get(kind, 0)  # type: ignore[no-untyped-call]
        others = "others use the rest, or a node is about to leave"
        raise _too_little(cluster, kind, f", of which {free:g} {kind}s are free; {others}")
    try:
        yield group, nodes
    finally:
        _remove(group)


def _placed(cluster: RayConfig, kind: Literal["CPU", "GPU"], nodes: int, seconds: float) -> Any:
    """Return a placement group over so many nodes; None where Ray does not reserve it within so many seconds."""
    import ray

    bundle = {"CPU": float(cluster.gpus_per_node)}
    if kind == "GPU":
        bundle["GPU"] = float(cluster.gpus_per_node)
    strategy = "STRICT_SPREAD" if nodes > 1 else "STRICT_PACK"
    group = ray.util.placement_group([dict(bundle) for _ in range(nodes)], strategy=strategy)
    is_placed = False
    try:
        is_placed = group.wait(seconds)
    finally:
        if not is_placed:
            _remove(group)
    return group if is_placed else None


def _remove(group: Any) -> None:
    import ray

    with suppress(Exception):  # a cluster that is gone holds nothing any more
        ray.util.remove_placement_group(group)


def _num_large(cluster: RayConfig, kind: str) -> int:
    """Return the number of nodes that are large enough, free or not."""
    return sum(_holds(node, cluster, kind) for node in _nodes())


def _holds(node: Any, cluster: RayConfig, kind: str) -> bool:
    wanted = cluster.gpus_per_node
    return bool(node["Resources"].get(kind, 0) >= wanted and node["Resources"].get("CPU", 0) >= wanted)


def _nodes() -> Sequence[Any]:
    import ray

    return [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]


def _too_little(cluster: RayConfig, kind: str, more: str) -> ConfigError:
    nodes = [_described(node, kind) for node in _nodes()]
    enough, fewest = _num_large(cluster, kind), cluster.min_nodes or cluster.nodes
    many = cluster.gpus_per_node
    per_node = f"{many} {kind}{'s' if many > 1 else ''}" + (f" and {many} CPUs" if kind == "GPU" else "")
    waited = f", also after {cluster.wait_s:g} s" if cluster.wait_s else ""
    return ConfigError(
        [
            Problem(
                path="cluster.nodes" if 0 < enough < fewest else "cluster.gpus_per_node",
                found=f"{fewest} node(s) with {per_node} each",
                expected=f"no more than the cluster has{waited}: {'; '.join(nodes) or 'no node at all'}{more}",
                remedy="Ask for less, add nodes, or set cluster.wait_s to wait for them.",
            )
        ]
    )


def _described(node: Any, kind: str) -> str:
    kinds = ("CPU",) if kind == "CPU" else ("GPU", "CPU")
    has = " and ".join(f"{node['Resources'].get(name, 0):g} {name}s" for name in kinds)
    return f"node {node['NodeManagerAddress']} with {has}"
