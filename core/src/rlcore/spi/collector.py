"""Collectors of samples, which answer the prompts of a run.

In `pyproject.toml`::

    [project.entry-points."rlcore.collectors"]
    tree = "my_package.provider:TREE"

In `my_package/provider.py`::

    TREE = CollectorProvider(name="tree", spi=(2, 0), priority=80, collector="my_package.tree:TreeCollector")
"""

from typing import Literal, TypeAlias, get_args

from attrs import field, frozen

from rlcore.schema.printable import plain_texts
from rlcore.spi.provider import as_frozen

COLLECTOR_GROUP = "rlcore.collectors"
"""Entry-point group of collectors, each a CollectorProvider under its name."""
RunKind: TypeAlias = Literal["episodes", "agents", "replay"]
"""The source of a run's samples: turns of generator and environment, an environment's agents, or the file of
`rlcore train --replay-schedule`."""
RUN_KINDS: tuple[RunKind, ...] = get_args(RunKind)


@frozen(kw_only=True, field_transformer=plain_texts)
class CollectorProvider:
    """The description of one collector. A run takes the one of the highest priority among those that collect for its kind."""

    name: str
    """Equal to the entry point's name."""
    spi: tuple[int, int]
    """The SPI version that the collector was written for: (major, minor)."""
    collector: str
    """`package.module:Class`, called as Class(rlcore.run.plan.collector.CollectorContext) before a run's data is read. It
    returns an rlcore.run.plan.collector.Collector."""
    check: str | None = None
    """`package.module:function`, called as function(rlcore.run.plan.run_plan.RunPlan) before the run, which returns its
    Problems and Notes; None where nothing can be wrong."""
    priority: int = 0
    """50 for those that are released with the core."""
    runs: frozenset[RunKind] = field(default=frozenset({"episodes"}), converter=as_frozen)
    """The kinds of runs that it collects for."""
