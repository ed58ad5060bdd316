"""The section `[cluster]`: how many machines and devices a run uses, and which of them train and generate.

An execution with keys of its own derives its config class from ClusterConfig; all keys stand in the one section.
"""

from typing import Literal

from attrs import frozen

from rlcore.schema.constraints import Count, Positive, Text


@frozen(kw_only=True)
class ClusterConfig:
    """`[cluster]`: worker processes, one per rank; without the section trainer and generator live in the driver's process."""

    execution: Text = "auto"
    """The execution that starts the workers, or "auto" for the usable one of the highest priority that runs several ranks."""
    nodes: Positive = 1
    """Machines to use."""
    gpus_per_node: Positive = 1
    """GPUs to use of each machine; on CPU, processes."""
    placement: Literal["colocated", "separate"] = "colocated"
    """The devices of trainer and generator: both share every device and take turns, or each has devices of its own."""
    generator_gpus_per_node: Count = 0
    """With "separate", how many of gpus_per_node generate; the others train."""
    reference_gpus_per_node: Count = 0
    """How many of gpus_per_node hold only the frozen model that the algorithm compares with, such as a teacher. It computes
    while the others generate and train. With 0 the trainer's ranks hold it beside the policy."""
    max_restarts: Count = 3
    """How often the workers are started anew, from the newest checkpoint, after one of them died or hung."""

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

    @property
    def is_separate(self) -> bool:
        """Return whether trainer and generator have devices of their own."""
        return self.placement == "separate"

    @property
    def reaches_machines(self) -> bool:
        """Return whether the section says how to reach several machines, as far as the execution asks for that."""
        return True

    def hosts_generator(self, rank: int, ranks_per_generator: int) -> bool:
        """Return whether a rank is the first of those that share a generator, or of its node where generators have their own
        devices."""
        return rank % (self.ranks_per_node if self.is_separate else ranks_per_generator) == 0

    def generator_devices(self, local_rank: int, ranks_per_generator: int) -> tuple[int, ...] | None:
        """The GPUs of the generator that a rank hosts, where the layout decides them; None otherwise."""
        if self.is_separate:
            return tuple(range(self.ranks_per_node, self.gpus_per_node))
        return None if ranks_per_generator == 1 else tuple(range(local_rank, local_rank + ranks_per_generator))
