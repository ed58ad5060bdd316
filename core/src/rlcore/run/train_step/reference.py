"""The frozen model that an algorithm compares the policy with, wherever it is."""

from attrs import frozen

from rlcore import spi
from rlcore.run.protocols import Backends, TrainerGroup
from rlcore.spi.arrays import Float32Array, Int64Array


@frozen(kw_only=True, eq=False)
class Reference:
    """The trainer's ranks, which hold it beside the policy, or a pool that holds nothing else. It is one model at every version
    of the policy's weights."""

    group: TrainerGroup
    is_apart: bool
    """Whether it has devices of its own: its version is then 0 for ever."""

    @classmethod
    def of(cls, backends: Backends) -> "Reference":
        """The reference of a run's backends."""
        return cls(group=backends.reference or backends.trainer, is_apart=backends.reference is not None)

    def logprobs(self, batch: spi.TokenBatch, sequences: Int64Array, weight_version: int) -> Float32Array:
        """float32 [T]: of every token of some of the batch's sequences, int64 [M], and 0.0 in the others. `weight_version` is
        the policy's."""
        return self.group.logprobs(batch, sequences, "reference", 0 if self.is_apart else weight_version)
