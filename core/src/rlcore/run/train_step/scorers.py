"""Scorers: they add columns to samples, of the reference, and of the trainer in place of tokens that are too old."""

from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np
from attrs import evolve, frozen

from rlcore import spi
from rlcore.registry.algorithm_handle import AlgorithmHandle
from rlcore.run.protocols import CollectedRollouts, LoopPosition, Scorer
from rlcore.run.report.timing import PhaseClock
from rlcore.spi import GENERATION_LOGPROBS, RolloutBatch
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


@frozen(kw_only=True, eq=False)
class LogprobsScorer:
    """Adds a model's log-probabilities for an algorithm that computes its batch from them."""

    column: str
    of_batch: Callable[[spi.TokenBatch, int], Float32Array]
    """Returns float32 [T] of every token of a batch, at a version of the policy's weights."""
    algorithm: AlgorithmHandle
    clock: PhaseClock

    def score(self, samples: spi.RolloutBatch, position: LoopPosition) -> spi.RolloutBatch:
        """See Scorer."""
        batch, scored = samples.batch, self.algorithm.teacher_batch(samples)
        with self.clock.phase("logprobs"):
            found = self.of_batch(scored, position.weight_version)
        if scored is not batch:
            of_teacher, found = found[scored.loss_mask], np.zeros(batch.num_tokens, found.dtype)
            found[batch.loss_mask] = of_teacher
        return evolve(samples, batch=samples.batch.with_token_column(self.column, found))


@frozen(kw_only=True, eq=False)
class Rescorer:
    """Replaces the generator's log-probabilities by the trainer's at loss tokens of weights older than `oldest_version`. To the
    loss they are tokens of the present policy, whose ratio is 1. Their weight versions stay, so that the comparison of trainer
    and generator leaves them out. Metric `async/tokens_rescored`: their number."""

    trainer: TrainerGroup
    clock: PhaseClock

    def score(self, samples: RolloutBatch, position: LoopPosition) -> RolloutBatch:  # noqa: ARG002 - samples know their weights
        """See Scorer."""
        if not isinstance(samples, CollectedRollouts) or not samples.oldest_version:
            return samples
        batch = samples.batch
        is_old = samples.older_than(samples.oldest_version)
        metrics = {**samples.schedule_metrics, "async/tokens_rescored": float(is_old.sum())}
        if is_old.any():
            sequences = np.flatnonzero(np.add.reduceat(is_old.astype(np.int64), batch.offsets[:-1]))
            with self.clock.phase("logprobs"):
                present = self.trainer.logprobs(batch, sequences, "policy", samples.weight_version)
            generated = batch.token_columns[GENERATION_LOGPROBS]
            batch = batch.with_token_column(GENERATION_LOGPROBS, np.where(is_old, present, generated))
        return evolve(samples, batch=batch, schedule_metrics=metrics)


def scorers_of(algorithm: AlgorithmHandle, reference: Reference, trainer: TrainerGroup, clock: PhaseClock) -> Iterator[Scorer]:
    """Yield the scorers that an algorithm needs, in their order."""

    def of_policy(batch: spi.TokenBatch, weight_version: int) -> Float32Array:
        return trainer.logprobs(batch, np.arange(batch.num_sequences), "policy", weight_version)

    yield Rescorer(trainer=trainer, clock=clock)
    needs = algorithm.needs
    for column, of_batch, is_needed in (
        (spi.REFERENCE_LOGPROBS, reference.of_batch, needs.reference_logprobs_in_rollouts),
        (spi.PREVIOUS_LOGPROBS, of_policy, needs.policy_logprobs_in_rollouts),
    ):
        if is_needed:
            yield LogprobsScorer(column=column, of_batch=of_batch, algorithm=algorithm, clock=clock)
