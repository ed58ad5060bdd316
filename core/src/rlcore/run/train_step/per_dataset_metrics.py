"""Computes metrics per data set, before the update, for a step that trains on several."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from attrs import define, evolve, field

from rlcore import spi
from rlcore.registry.algorithm_handle import AlgorithmHandle
from rlcore.run.protocols import LoopObserver, TrainedStep
from rlcore.spi.arrays import Float32Array, Int64Array
from rlcore.spi.execution import TrainerGroup


@define(kw_only=True, eq=False)
class PerDatasetMetrics(LoopObserver):
    """Gathers the log-probabilities that a step's updates have begun with, and measures those of each data set."""

    algorithm: AlgorithmHandle
    sets_of: Callable[[int], Sequence[str]]
    """[G]: the data set of each group of a step."""
    _updates: list[tuple[Int64Array, Float32Array]] = field(init=False, factory=list)
    """The step's updates: sequences, int64 [M], and float32 [T] of these, 0.0 in the others."""

    @staticmethod
    def are_measurable(algorithm: AlgorithmHandle, trainer: TrainerGroup) -> bool:
        """Return whether they need no more than the log-probabilities that an update can return."""
        needs = algorithm.needs
        can_return = trainer.has(spi.capabilities.STEP_LOGPROBS) and needs.head == "tokens"
        return algorithm.measures and can_return and not needs.reference_logprobs

    def add(self, sequences: Int64Array, logprobs: Float32Array) -> None:
        """An update on some of the batch's sequences, int64 [M]: float32 [T] of these, 0.0 in the others."""
        self._updates.append((sequences, logprobs))

    def trained(self, step: TrainedStep) -> Mapping[str, float]:
        """`data/<set>/samples`, and `data/<set>/<name>` of each figure."""
        samples, sets = step.scored, self.sets_of(step.step)
        logprobs, updated = np.zeros(samples.batch.num_tokens, np.float32), set[int]()
        for sequences, found in self._updates:
            logprobs = logprobs + found
            updated.update(samples.group_ids[sequences].tolist())
        self._updates.clear()
        figures: dict[str, float] = {}
        for name in sorted({*sets}):
            groups = [group for group, of in enumerate(sets) if of == name and group in updated]
            sequences = np.flatnonzero(np.isin(samples.group_ids, groups))
            figures[f"data/{name}/samples"] = float(len(sequences))
            if len(sequences):
                offsets = samples.batch.offsets
                of_set = np.concatenate([logprobs[offsets[one] : offsets[one + 1]] for one in sequences])
                measured = self.algorithm.measure(_part(samples, sequences), of_set, None)
                figures |= {f"data/{name}/{figure}": value for figure, value in measured.items()}
        return figures


def _part(samples: spi.RolloutBatch, sequences: Int64Array) -> spi.RolloutBatch:
    batch = samples.batch.select(sequences)
    _, groups = np.unique(batch.sequence_columns[spi.GROUP_IDS], return_inverse=True)
    return evolve(
        samples,
        batch=evolve(batch, sequence_columns={**batch.sequence_columns, spi.GROUP_IDS: groups.astype(np.int32)}),
        rewards=samples.rewards[sequences],
        valid=samples.valid[sequences],
        finish_reasons=samples.finish_reasons[sequences],
        truncated=samples.truncated[sequences],
    )
