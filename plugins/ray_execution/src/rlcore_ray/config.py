"""The keys that Ray adds to the section `[cluster]`."""

import math
import re
from collections.abc import Iterator
from typing import Annotated, Literal

from attrs import frozen

from rlcore.schema.constraints import Constraint, Count, Positive, Seconds, at_least
from rlcore.spi import CheckContext, ClusterConfig, Problem, find_channel

_RAY_ADDRESS = Constraint(
    'that is "auto" or the "host:port" of a Ray head',
    lambda value: value == "auto" or re.fullmatch(r"[^\s/]+:[0-9]+", value) is not None,
    "Leave the key out to start a local cluster.",
)


@frozen(kw_only=True)
class Elastic:
    """`[cluster.elastic]`: engines beside those of the trainer's nodes, which join and leave a run that goes on."""

    min: Count = 0
    """Fewest engines. With room for fewer, also after wait_s, the run does not begin, or its workers restart."""
    max: Positive
    """Most engines. Each has a process of its own, which Ray starts wherever there is room for it."""
    gpus: Positive = 1
    """GPUs of each engine, as many as the section of the generator needs; on CPU, processors."""


@frozen(kw_only=True)
class RayConfig(ClusterConfig):
    """`[cluster]` on Ray."""

    address: Annotated[str, _RAY_ADDRESS] | None = None
    """A running Ray cluster to join: its head's "host:port", or "auto" for the one that this machine belongs to. None starts a
    local one, which only this machine can reach, and stops it at the end."""
    wait_s: Annotated[float, Constraint("of seconds of at least 0", lambda value: 0 <= value < math.inf)] = 0.0
    """Most seconds to wait for a cluster that is smaller than required; 0 ends the run at once."""
    min_nodes: Count = 0
    """The fewest nodes to go on with when fewer than `nodes` are there, at the start and after a node has left. A run counts
    tokens and samples over all ranks, so its sums stay the same. 0 needs all nodes."""
    elastic: Elastic | None = None
    """Engines that join the run as nodes come and leave it as nodes go, beside those of `nodes`; None for none."""
    collectors: Literal["auto"] | Positive = 1
    """Processes that collect samples beside the engines: prompts, turns, environments and rewards. With 1 the driver collects.
    "auto" starts one on each node with engines; on a single node the driver collects."""
    max_engine_restarts: Count = 3
    """How often the engine of one generator may fail within engine_restart_window_s while other generators go on. They take
    over its requests, and it is restarted and refitted. One failure more ends the run. With 0 the failure of one engine fails
    the whole generation or refit (refit.max_attempts)."""
    engine_restart_window_s: Seconds = 3600.0
    """The seconds within which the failures of an engine are counted for max_engine_restarts."""
    start_timeout_s: Seconds = 1800.0
    """Most seconds for all workers to start and to load the model."""
    call_timeout_s: Seconds = 3600.0
    """Most seconds for one call of a worker, such as the generation of a step."""
    straggler_timeout_s: Seconds = 300.0
    """Most seconds that a rank may lag behind the first one in what all do together."""
    object_store_mib: Annotated[int, at_least(75, "Ray takes no less; leave the key out for its own choice.")] | None = None
    """Memory of a local cluster's object store, through which a step's data travels; None leaves it to Ray."""

    @property
    def reaches_machines(self) -> bool:
        """Return whether the section says where Ray runs, as several machines need."""
        return self.address is not None


def check(context: CheckContext, config: RayConfig) -> Iterator[Problem]:
    """Find what a cluster cannot do."""
    if config.min_nodes > config.nodes:
        yield Problem(
            path="cluster.min_nodes",
            found=f"{config.min_nodes}, more than cluster.nodes = {config.nodes}",
            expected="at most cluster.nodes, the nodes that the run uses where they are there",
        )
    if config.nodes > 1 and not config.reaches_machines:
        yield Problem(
            path="cluster.nodes",
            found=f"{config.nodes}, without an address",
            expected="1, since a local cluster is this machine alone, or the address of a running cluster",
            remedy='Start Ray on every machine and set cluster.address = "auto".',
        )
    if config.elastic is not None:
        yield from _elastic_problems(context, config, config.elastic)


def _elastic_problems(context: CheckContext, config: RayConfig, elastic: Elastic) -> Iterator[Problem]:
    """Yield what engines that join and leave do not go with."""
    if elastic.min > elastic.max:
        found = f"{elastic.min}, more than cluster.elastic.max = {elastic.max}"
        yield Problem(path="cluster.elastic.min", found=found, expected="at most cluster.elastic.max")
    if not config.reaches_machines:
        found, remedy = (
            "engines of other nodes, without an address",
            'Start Ray on every machine and set cluster.address = "auto".',
        )
        yield Problem(path="cluster.elastic", found=found, expected="the address of a running cluster", remedy=remedy)
    if config.collectors != 1:
        found = f"{config.collectors!r}, with cluster.elastic"
        yield Problem(path="cluster.collectors", found=found, expected="1: the driver collects from engines that come and go")
    if context.channel is None:
        found = "engines, in a run that refits none"
        yield Problem(path="cluster.elastic", found=found, expected="a run with a generator that the trainer refits")
    elif find_channel(context.channel).sharded:
        found = f"{context.channel!r}, with cluster.elastic"
        yield Problem(path="refit.channel", found=found, expected='a channel of whole tensors, such as "nccl" or "directory"')
    if context.generator_lora is not None:
        found = "engines that hold adapters beside the weights, with cluster.elastic"
        remedy = "An engine that joins gets whole weights."
        yield Problem(path="refit.adapters", found=found, expected='"merged"', remedy=remedy)
