"""The section `[cluster]`: how many machines and devices a run uses, and how long it waits for them."""

import math
import re
from typing import Annotated, Literal

from attrs import frozen

from rlcore.schema.constraints import Constraint, Count, Positive, Seconds, at_least

_RAY_ADDRESS = Constraint(
    'that is "auto" or the "host:port" of a Ray head',
    lambda value: value == "auto" or re.fullmatch(r"[^\s/]+:[0-9]+", value) is not None,
    "Leave the key out to start a local cluster.",
)


@frozen(kw_only=True)
class ClusterConfig:
    """`[cluster]`: trainer and generator on Ray, one worker per rank; without the section they live in the driver's process."""

    nodes: Positive = 1
    """Machines to use."""
    gpus_per_node: Positive = 1
    """GPUs to use of each machine; on CPU, processes."""
    placement: Literal["colocated", "separate"] = "colocated"
    """Whether trainer and generator share every device and take turns, or each has devices of its own."""
    generator_gpus_per_node: Count = 0
    """With "separate", how many of gpus_per_node generate; the others train."""
    reference_gpus_per_node: Count = 0
    """How many of gpus_per_node hold the frozen model that the algorithm compares with, a teacher for one, and nothing else; it
    computes while the others generate and train. With 0 the trainer's ranks hold it beside the policy."""
    address: Annotated[str, _RAY_ADDRESS] | None = None
    """A running Ray cluster to join: its head's "host:port", or "auto" for the one that this machine belongs to. None starts a
    local one, which only this machine can reach, and stops it at the end."""
    wait_s: Annotated[float, Constraint("of seconds of at least 0", lambda value: 0 <= value < math.inf)] = 0.0
    """Most seconds to wait for a cluster that has less than is asked for; 0 ends the run at once."""
    max_restarts: Count = 3
    """How often the workers are started anew, from the newest checkpoint, after one of them died or hung."""
    max_engine_restarts: Count = 3
    """How often the engine of one generator may fail within engine_restart_window_s while those of others go on: what it had to
    generate is dealt to them, and it is started anew and refitted. One failure more ends the run. With 0 the failure of one
    engine is that of the whole generation or refit (refit.max_attempts)."""
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
    def ranks_per_node(self) -> int:
        """The trainer's ranks on each machine."""
        return self.gpus_per_node - self.generator_gpus_per_node - self.reference_gpus_per_node

    @property
    def world_size(self) -> int:
        """The trainer's ranks."""
        return self.nodes * self.ranks_per_node

    @property
    def num_reference_ranks(self) -> int:
        """The ranks of a reference that has devices of its own."""
        return self.nodes * self.reference_gpus_per_node
