"""Computes metrics per data set, before the update, for a step that trains on several."""

from collections.abc import Sequence

import numpy as np
from attrs import define, evolve, field

from rlcore import spi
from rlcore.registry.algorithm_handle import AlgorithmHandle
from rlcore.spi.arrays import Float32Array, Int64Array


@define(kw_only=True, eq=False)
class PerDatasetMetrics:
    """Gathers the log-probabilities that a step's updates have begun with."""

    algorithm: AlgorithmHandle
    samples: spi.RolloutBatch
    sets: Sequence[str]
    """[G]: the data set of each group."""
    _logprobs: Float32Array = field(init=False)
    _is_known: set[int] = field(init=False, factory=set)
    """Groups that an update was made on."""

    @_logprobs.default
    def _nothing(self) -> Float32Array:
        return np.zeros(self.samples.batch.num_tokens, np.float32)

    def add(self, sequences: Int64Array, logprobs: Float32Array) -> None:
        """An update on some of the batch's sequences, int64 [M]: float32 [T] of these, 0.0 in the others."""
        self._logprobs = self._logprobs + logprobs
        self._is_known.update(self.samples.group_ids[sequences].tolist())

    def metrics(self) -> dict[str, float]:
        """`data/<set>/samples`, and `data/<set>/<name>` of each figure."""
        found: dict[str, float] = {}
        for name in sorted({*self.sets}):
            groups = [group for group, of in enumerate(self.sets) if of == name and group in self._is_known]
            sequences = np.flatnonzero(np.isin(self.samples.group_ids, groups))
            found[f"data/{name}/samples"] = float(len(sequences))
            if len(sequences):
                figures = self.algorithm.measure(self._part(sequences), self._of(sequences), None)
                found |= {f"data/{name}/{figure}": value for figure, value in figures.items()}
        return found

    def _of(self, sequences: Int64Array) -> Float32Array:
        offsets = self.samples.batch.offsets
        return np.concatenate([self._logprobs[offsets[one] : offsets[one + 1]] for one in sequences])

    def _part(self, sequences: Int64Array) -> spi.RolloutBatch:
        samples, batch = self.samples, self.samples.batch.select(sequences)
        _, groups = np.unique(batch.sequence_columns[spi.GROUP_IDS], return_inverse=True)
        return evolve(
            samples,
            batch=evolve(batch, sequence_columns={**batch.sequence_columns, spi.GROUP_IDS: groups.astype(np.int32)}),
            rewards=samples.rewards[sequences],
            valid=samples.valid[sequences],
            finish_reasons=samples.finish_reasons[sequences],
            truncated=samples.truncated[sequences],
        )
