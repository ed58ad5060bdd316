"""The samples on which generator and trainer disagree most."""

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from rlcore.spi import GENERATION_LOGPROBS, TokenBatch
from rlcore.spi.arrays import Float32Array, Int64Array

MAX_SAMPLES = 16
LARGEST_EXPONENT = 700.0
"""The largest exponent whose power of e is a finite float64."""


@frozen(kw_only=True, eq=False)
class WorstSamples:
    """The worst samples of a minibatch, MAX_SAMPLES at most, worst first; all arrays are in this order."""

    batch: TokenBatch
    """S samples, T tokens, with the columns GENERATION_LOGPROBS and WEIGHT_VERSIONS."""
    trainer_logprobs: Float32Array
    """float32 [T]: computed at every token but the first of a sample, whatever the loss mask says."""
    differences: Float32Array
    """float32 [T]: trainer - generation; 0.0 where the loss mask is False."""
    errors: NDArray[np.float64]
    """float64 [S]: mean of exp(|difference|) over the sample's loss tokens."""
    trainer_version: int
    """Version of the weights that the trainer computed with."""

    @classmethod
    def of(cls, batch: TokenBatch, trainer_logprobs: Float32Array, trainer_version: int) -> "WorstSamples":
        """The worst of `batch`, whose log-probabilities in the trainer are `trainer_logprobs` float32 [T]."""
        mask = batch.loss_mask
        differences = np.where(mask, trainer_logprobs - batch.token_columns[GENERATION_LOGPROBS], np.float32(0.0))
        ratios = np.where(mask, np.exp(np.minimum(np.abs(differences, dtype=np.float64), LARGEST_EXPONENT)), 0.0)
        counts = np.add.reduceat(mask.astype(np.int64), batch.offsets[:-1])
        errors = np.add.reduceat(ratios, batch.offsets[:-1]) / np.maximum(counts, 1)
        order = np.argsort(-errors, kind="stable")[: min(MAX_SAMPLES, np.count_nonzero(counts))]
        columns = batch.with_token_column("trainer", trainer_logprobs).with_token_column("difference", differences)
        chosen = columns.select(order)
        return cls(
            batch=chosen,
            trainer_logprobs=chosen.token_columns["trainer"],
            differences=chosen.token_columns["difference"],
            errors=errors[order],
            trainer_version=trainer_version,
        )

    @property
    def worst_positions(self) -> Int64Array:
        """int64 [S]: where in each sample, its prompt included, the difference is largest."""
        by_sample = np.split(np.abs(self.differences), self.batch.offsets[1:-1])
        return np.array([sample.argmax() for sample in by_sample], np.int64)

    def describe_worst_token(self) -> str:
        """The token of the largest difference in the worst sample, in words."""
        position = int(self.worst_positions[0])
        generation, trainer = self.batch.token_columns[GENERATION_LOGPROBS][position], self.trainer_logprobs[position]
        return (
            f"id {self.batch.tokens[position]} at position {position} of sample 1, "
            f"of probability {np.exp(generation):.4g} in the generator and {np.exp(trainer):.4g} in the trainer"
        )
