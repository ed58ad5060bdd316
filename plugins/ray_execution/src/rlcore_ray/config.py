"""The keys that Ray adds to the section `[cluster]`."""

import math
import re
from collections.abc import Iterator
from typing import Annotated, Literal

from attrs import frozen

from rlcore.schema.constraints import Constraint, Count, Positive, Seconds, at_least
from rlcore.spi import CheckContext, ClusterConfig, Problem

_RAY_ADDRESS = Constraint(
    'that is "auto" or the "host:port" of a Ray head',
    lambda value: value == "auto" or re.fullmatch(r"[^\s/]+:[0-9]+", value) is not None,
    "Leave the key out to start a local cluster.",
)


@frozen(kw_only=True)
class RayConfig(ClusterConfig):
    """`[cluster]` on Ray."""

    address: Annotated[str, _RAY_ADDRESS] | None = None
    """A running Ray cluster to join: its head's "host:port", or "auto" for the one that this machine belongs to. None starts a
    local one, which only this machine can reach, and stops it at the end."""
    wait_s: Annotated[float, Constraint("of seconds of at least 0", lambda value: 0 <= value < math.inf)] = 0.0
    """Most seconds to wait for a cluster that is smaller than required; 0 ends the run at once."""
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


def check(context: CheckContext, config: RayConfig) -> Iterator[Problem]:  # noqa: ARG001 - the form of Provider.check
    """Find what a local cluster cannot do."""
    if config.nodes > 1 and not config.reaches_machines:
        yield Problem(
            path="cluster.nodes",
            found=f"{config.nodes}, without an address",
            expected="1, since a local cluster is this machine alone, or the address of a running cluster",
            remedy='Start Ray on every machine and set cluster.address = "auto".',
        )
