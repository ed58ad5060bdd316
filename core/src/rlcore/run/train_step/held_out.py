"""How well held-out rows of a data set are known: the algorithm's figures of their log-probabilities, or values, at present
weights."""

import numpy as np
from attrs import define, field

from rlcore import spi
from rlcore.registry.algorithm_handle import AlgorithmHandle
from rlcore.run.data.examples import Examples, example_batch
from rlcore.run.protocols import TrainerGroup
from rlcore.spi.arrays import Float32Array, Int64Array


@define(kw_only=True, eq=False)
class HeldOutExamples:
    """What `evaluation.max_prompts` lets pass of a held-out set."""

    samples: spi.RolloutBatch
    algorithm: AlgorithmHandle
    trainer: TrainerGroup
    _reference: Float32Array | None = field(init=False, default=None)

    @classmethod
    def of(cls, examples: Examples, rows: Int64Array, algorithm: AlgorithmHandle, trainer: TrainerGroup) -> "HeldOutExamples":
        """Some rows of the data set, which are among the examples'. `rows` int64 [M], ascending."""
        indices = np.searchsorted(examples.rows, rows)
        return cls(samples=example_batch(examples, indices), algorithm=algorithm, trainer=trainer)

    def evaluate(self, weight_version: int) -> dict[str, float]:
        """The algorithm's figures, each as `evaluation/<name>`. The reference is asked once: it never changes."""
        batch = self.samples.batch
        every = np.arange(batch.num_sequences)
        if self.algorithm.needs.head == "value":
            values = self.trainer.values(batch, every, weight_version)
            return _named(self.algorithm.measure_values(self.samples, values))
        logprobs = self.trainer.logprobs(batch, every, "policy", weight_version)
        if self.algorithm.needs.reference_logprobs and self._reference is None:
            self._reference = self.trainer.logprobs(batch, every, "reference", weight_version)
        return _named(self.algorithm.measure(self.samples, logprobs, self._reference))


def _named(figures: dict[str, float]) -> dict[str, float]:
    return {f"evaluation/{name}": value for name, value in figures.items()}
