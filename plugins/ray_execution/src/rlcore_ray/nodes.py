"""Checks of what the nodes of a pool share: software, the folder of the run, and the time."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from uuid import uuid4

from rlcore.spi import ConfigError, ExecutionProgress, PluginError, Problem
from rlcore_ray.calls import Calls
from rlcore_ray.commands import Arrival, Software
from rlcore_ray.failures import WorkerInfo

LOOK_S = 60.0
"""Most seconds for all ranks to look for a file."""
CLOCK_S = 30.0
"""Seconds that a node's clock may differ without a warning."""


def require_same(workers: Sequence[WorkerInfo], software: Sequence[Software]) -> None:
    """PluginError, naming the nodes, unless they all have the driver's versions of what decides on results."""
    expected = dict(Software.here().versions)
    wrong = []
    for worker, found in zip(workers, software, strict=True):
        here = dict(found.versions)
        differing = [f"{name} {here.get(name, 'missing')}" for name in expected | here if here.get(name) != expected.get(name)]
        if differing:
            wrong.append((", ".join(differing), worker.node))
    if wrong:
        lines = "".join(f"\n  - node(s) {', '.join(nodes)}: {what}" for what, nodes in grouped(wrong).items())
        has = ", ".join(f"{name} {version}" for name, version in expected.items())
        raise PluginError(f"not every node has the driver's software ({has}); install the same versions:{lines}")


def grouped(pairs: Sequence[tuple[str, str]]) -> Mapping[str, list[str]]:
    """Return the distinct second members by the first."""
    return {key: sorted({node for _, node in group}) for key, group in groupby(sorted(pairs), key=lambda pair: pair[0])}


def require_shared(calls: Calls, directory: Path | None) -> None:
    """ConfigError, naming the nodes, unless all ranks see a file that the driver writes into the run's folder of logs."""
    if directory is None:
        return
    directory.mkdir(parents=True, exist_ok=True)
    file = directory.absolute() / f".shared-{uuid4().hex}"
    file.touch()
    try:
        found: list[bool] = calls.all("sees", file, limit_s=LOOK_S)
    finally:
        file.unlink(missing_ok=True)
    without = sorted({worker.node for worker, is_there in zip(calls.workers, found, strict=True) if not is_there})
    if without:
        problem = Problem(
            path="run.directory",
            found=f"{directory.absolute().parent}, which node(s) {', '.join(without)} do not share with the driver",
            expected="a folder that all nodes have mounted at this path: each rank writes its part of a checkpoint",
            remedy="Mount it there, or set run.directory to a folder that they share.",
        )
        raise ConfigError([problem])


def note_clocks(arrived: Sequence[Arrival], began: float, ended: float, progress: ExecutionProgress) -> None:
    """Warn of nodes whose clocks differ from the driver's, which read `began` before they arrived and `ended` after."""
    off = {}
    for arrival in arrived:
        seconds = max(began - arrival.clock, 0.0) - max(arrival.clock - ended, 0.0)
        if abs(seconds) > CLOCK_S:
            off[arrival.worker.node] = (
                f"node {arrival.worker.node} is {abs(seconds):.0f} s {'behind' if seconds > 0 else 'ahead'}"
            )
    if off:
        progress.note(
            f"clocks differ from the driver's: {'; '.join(off.values())}. The run goes on, as it depends on no clock; "
            "times in the nodes' logs are wrong. Set the clocks, as by NTP"
        )
