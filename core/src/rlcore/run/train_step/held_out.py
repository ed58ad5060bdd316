"""Rows of a data set with answers: the source of steps that learn from them, and the figures of those that are held out."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from attrs import define, field, frozen

from rlcore import spi
from rlcore.config.recipe import Recipe
from rlcore.registry.algorithm_handle import AlgorithmHandle
from rlcore.run.data.examples import Examples, example_batch
from rlcore.run.data.prompt_stream import PromptOrder
from rlcore.run.protocols import LoopObserver, Source, WeightSync, always
from rlcore.run.report.timing import PhaseClock
from rlcore.run.train_step.scorers import Reference
from rlcore.spi import RolloutBatch
from rlcore.spi.arrays import Float32Array, Int64Array, take_rows
from rlcore.spi.execution import Backends, TrainerGroup


@frozen(kw_only=True, eq=False)
class ExampleSource(Source):
    """Source of batches from answers of the data set."""

    examples: Examples
    stream: PromptOrder
    names_of: Callable[[Int64Array], Sequence[str]] | None = None
    """The data sets of rows, by their numbers; None where there is only one."""

    def sets_of_examples(self, step: int) -> Sequence[str]:
        """[G]: the data set of each group of a step's examples, where there are several; none otherwise."""
        return () if self.names_of is None else self.names_of(self.examples.rows[self.stream.indices(step - 1)])

    def sample(
        self,
        step: int,
        weight_version: int,  # noqa: ARG002 - no policy is asked
        may_go_on: Callable[[], bool] = always,  # noqa: ARG002 - nothing takes time
    ) -> RolloutBatch:
        """The examples of a step."""
        return example_batch(self.examples, self.stream.indices(step - 1))


@frozen(kw_only=True, eq=False)
class _Part:
    """The samples of one of several data sets."""

    samples: spi.RolloutBatch
    sequences: Int64Array
    """int64: their sequences among all."""


@define(kw_only=True, eq=False)
class HeldOutExamples:
    """The examples of a held-out set, at most `evaluation.max_prompts`."""

    samples: spi.RolloutBatch
    algorithm: AlgorithmHandle
    trainer: TrainerGroup
    reference: Reference
    parts: Mapping[str, _Part]
    _reference: Float32Array | None = field(init=False, default=None)

    @classmethod
    def of(
        cls,
        examples: Examples,
        rows: Int64Array,
        algorithm: AlgorithmHandle,
        backends: Backends,
        sets: Sequence[str] = (),
    ) -> "HeldOutExamples":
        """Some rows of the data set, which are among the examples'. `rows` int64 [M], ascending; `sets` [M] are the names of
        their data sets, where there are several."""
        indices, set_of = np.searchsorted(examples.rows, rows), np.asarray(sets, object)
        samples, parts = example_batch(examples, indices), {}
        for name in dict.fromkeys(sets):
            groups = np.flatnonzero(set_of == name)
            sequences = np.flatnonzero(np.isin(samples.group_ids, groups))
            parts[name] = _Part(samples=example_batch(examples, indices[groups]), sequences=sequences)
        reference = Reference.of(backends)
        return cls(samples=samples, algorithm=algorithm, trainer=backends.trainer, reference=reference, parts=parts)

    def evaluate(self, weight_version: int) -> dict[str, float]:
        """The algorithm's figures, each as `eval/<name>`, and of each of several data sets as `eval/<name>/<set>`.
        The reference is asked once: it never changes."""
        batch, needs = self.samples.batch, self.algorithm.needs
        every = np.arange(batch.num_sequences)
        if needs.head == "value":
            found = self.trainer.values(batch, every, weight_version)
        else:
            found = self.trainer.logprobs(batch, every, "policy", weight_version)
            if needs.reference_logprobs and self._reference is None:
                self._reference = self.reference.logprobs(batch, every, weight_version)
        figures = self._measured(self.samples, found, self._reference)
        named = {f"eval/{name}": value for name, value in figures.items()}
        for of_set, part in self.parts.items():
            reference = None if self._reference is None else take_rows(self._reference, batch.offsets, part.sequences)
            figures = self._measured(part.samples, take_rows(found, batch.offsets, part.sequences), reference)
            named |= {f"eval/{name}/{of_set}": value for name, value in figures.items()}
        return named

    def _measured(self, samples: spi.RolloutBatch, found: Float32Array, reference: Float32Array | None) -> dict[str, float]:
        if self.algorithm.needs.head == "value":
            return self.algorithm.measure_values(samples, found)
        return self.algorithm.measure(samples, found, reference)


@frozen(kw_only=True, eq=False)
class HeldOutObserver(LoopObserver):
    """Measures the weights before the first step, every few steps and after the last one, as `[evaluation]` says."""

    recipe: Recipe
    weights: WeightSync
    clock: PhaseClock

    def on_measure(self, step: int, weight_version: int) -> Mapping[str, float]:
        """See LoopObserver."""
        options, is_last = self.recipe.evaluation, step == self.recipe.run.num_steps
        is_due = (options.at_end and is_last) or (options.every_n_steps > 0 and step % options.every_n_steps == 0)
        return self.evaluate(step, weight_version) if (is_due if step else options.at_start) else {}

    @abstractmethod
    def evaluate(self, step: int, weight_version: int) -> Mapping[str, float]:
        """The figures, named `eval/…`."""


@frozen(kw_only=True, eq=False)
class ExampleObserver(HeldOutObserver):
    """Has the algorithm measure held-out examples."""

    examples: HeldOutExamples

    def evaluate(self, step: int, weight_version: int) -> Mapping[str, float]:  # noqa: ARG002 - nothing is kept
        """See HeldOutObserver."""
        self.weights.to_training()
        with self.clock.phase("evaluation"):
            return self.examples.evaluate(weight_version)
