"""Tokens that are too old get the trainer's log-probabilities."""

import numpy as np
from attrs import evolve

from rlcore.run.protocols import CollectedRollouts, TrainerGroup
from rlcore.spi import GENERATION_LOGPROBS, WEIGHT_VERSIONS


def rescored(samples: CollectedRollouts, trainer: TrainerGroup) -> CollectedRollouts:
    """The samples, with the trainer's log-probabilities in place of the generator's at loss tokens of weights older than
    `oldest_version`. These then count as of the trainer's version: to the loss they are what the present policy might have
    said, whose ratio is 1. Metric `async/tokens_rescored`: how many they are."""
    batch = samples.batch
    versions = batch.token_columns[WEIGHT_VERSIONS]
    is_old = samples.older_than(samples.oldest_version)
    metrics = {**samples.schedule_metrics, "async/tokens_rescored": float(is_old.sum())}
    if is_old.any():
        sequences = np.flatnonzero(np.add.reduceat(is_old.astype(np.int64), batch.offsets[:-1]))
        present = trainer.logprobs(batch, sequences, "policy", samples.weight_version)
        generated = batch.token_columns[GENERATION_LOGPROBS]
        batch = batch.with_token_column(GENERATION_LOGPROBS, np.where(is_old, present, generated))
        batch = batch.with_token_column(WEIGHT_VERSIONS, np.where(is_old, np.int32(samples.weight_version), versions))
    return evolve(samples, batch=batch, schedule_metrics=metrics)
