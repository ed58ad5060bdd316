"""Tokens that are too old get the trainer's log-probabilities."""

import numpy as np
from attrs import evolve, frozen

from rlcore.run.protocols import CollectedRollouts, LoopPosition
from rlcore.run.report.timing import PhaseClock
from rlcore.spi import GENERATION_LOGPROBS, RolloutBatch
from rlcore.spi.execution import TrainerGroup


@frozen(kw_only=True, eq=False)
class Rescorer:
    """Scores tokens that are older than their samples allow."""

    trainer: TrainerGroup
    clock: PhaseClock

    def score(self, samples: RolloutBatch, position: LoopPosition) -> RolloutBatch:  # noqa: ARG002 - samples know their weights
        """See Scorer."""
        if not isinstance(samples, CollectedRollouts) or not samples.oldest_version:
            return samples
        with self.clock.phase("logprobs"):
            return rescored(samples, self.trainer)


def rescored(samples: CollectedRollouts, trainer: TrainerGroup) -> CollectedRollouts:
    """The samples, with the trainer's log-probabilities in place of the generator's at loss tokens of weights older than
    `oldest_version`. To the loss they are what the present policy might have said, whose ratio is 1. They keep the versions of
    the weights that said them: the trainer is not to be compared with itself where it is compared with the generator. Metric
    `async/tokens_rescored`: how many they are."""
    batch = samples.batch
    is_old = samples.older_than(samples.oldest_version)
    metrics = {**samples.schedule_metrics, "async/tokens_rescored": float(is_old.sum())}
    if is_old.any():
        sequences = np.flatnonzero(np.add.reduceat(is_old.astype(np.int64), batch.offsets[:-1]))
        present = trainer.logprobs(batch, sequences, "policy", samples.weight_version)
        generated = batch.token_columns[GENERATION_LOGPROBS]
        batch = batch.with_token_column(GENERATION_LOGPROBS, np.where(is_old, present, generated))
    return evolve(samples, batch=batch, schedule_metrics=metrics)
