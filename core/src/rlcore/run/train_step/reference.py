"""The frozen model that an algorithm compares the policy with, wherever it is."""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from attrs import evolve, frozen

from rlcore import spi
from rlcore.run.protocols import LoopPosition
from rlcore.run.report.timing import PhaseClock
from rlcore.spi.arrays import Float32Array, Int32Array, Int64Array
from rlcore.spi.execution import Backends, TrainerGroup

OnTokens: TypeAlias = Callable[[Int32Array, tuple[bytes, ...]], None]
"""Hears of the tokens of a sequence, and of the images that it reads, from any thread."""


@frozen(kw_only=True, eq=False)
class Reference:
    """The trainer's ranks, which hold it beside the policy, or a pool that holds nothing else. It is one model at every version
    of the policy's weights."""

    group: TrainerGroup
    is_apart: bool
    """True where it has devices of its own: its version is then 0 for ever."""

    @classmethod
    def of(cls, backends: Backends) -> "Reference":
        """The reference of a run's backends."""
        return cls(group=backends.reference or backends.trainer, is_apart=backends.reference is not None)

    @property
    def on_tokens(self) -> OnTokens | None:
        """Return a function to call with each sequence once it is sampled; None where nothing is computed ahead."""
        return None

    def is_beside(self, trainer: TrainerGroup) -> bool:
        """Return whether the trainer's ranks hold it, and are asked when an update needs it."""
        return self.group is trainer

    def logprobs(self, batch: spi.TokenBatch, sequences: Int64Array, weight_version: int) -> Float32Array:
        """float32 [T]: of every token of some of the batch's sequences, int64 [M], and 0.0 in the others. `weight_version` is
        the policy's."""
        return self.group.logprobs(batch, sequences, "reference", 0 if self.is_apart else weight_version)

    def of_batch(self, batch: spi.TokenBatch, weight_version: int) -> Float32Array:
        """float32 [T]: of every token of a batch."""
        return self.logprobs(batch, np.arange(batch.num_sequences), weight_version)

    def with_column(self, batch: spi.TokenBatch, weight_version: int) -> spi.TokenBatch:
        """The batch with the column of these."""
        return batch.with_token_column(spi.REFERENCE_LOGPROBS, self.of_batch(batch, weight_version))


@frozen(kw_only=True, eq=False)
class ReferenceScorer:
    """Adds the reference's log-probabilities for an algorithm that computes rewards from them."""

    reference: Reference
    clock: PhaseClock

    def score(self, samples: spi.RolloutBatch, position: LoopPosition) -> spi.RolloutBatch:
        """See Scorer."""
        with self.clock.phase("logprobs"):
            return evolve(samples, batch=self.reference.with_column(samples.batch, position.weight_version))
