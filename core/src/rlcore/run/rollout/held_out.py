"""Measures held-out rows after the steps that the recipe names."""

import time
from abc import abstractmethod
from collections.abc import Callable, Mapping

from attrs import frozen

from rlcore.config.recipe import Recipe
from rlcore.run.protocols import CollectedRollouts, LoopObserver, Source, WeightSync
from rlcore.run.report.progress import Progress
from rlcore.run.report.timeline import DRIVER
from rlcore.run.report.timing import PhaseClock
from rlcore.run.rollout.sources import HeldOutEvaluator
from rlcore.run.train_step.held_out import HeldOutExamples


@frozen(kw_only=True, eq=False)
class HeldOutObserver(LoopObserver):
    """Measures the weights before the first step, every few steps and after the last one, as `[evaluation]` says."""

    recipe: Recipe
    weights: WeightSync
    clock: PhaseClock

    def measure(self, step: int, weight_version: int) -> Mapping[str, float]:
        """See LoopObserver."""
        options, is_last = self.recipe.evaluation, step == self.recipe.run.num_steps
        is_due = (options.at_end and is_last) or (options.every_n_steps > 0 and step % options.every_n_steps == 0)
        return self.evaluate(step, weight_version) if (is_due if step else options.at_start) else {}

    @abstractmethod
    def evaluate(self, step: int, weight_version: int) -> Mapping[str, float]:
        """The figures, named `evaluation/…`."""


@frozen(kw_only=True, eq=False)
class ExampleObserver(HeldOutObserver):
    """Has the algorithm measure held-out examples."""

    examples: HeldOutExamples

    def evaluate(self, step: int, weight_version: int) -> Mapping[str, float]:  # noqa: ARG002 - nothing is kept
        """See HeldOutObserver."""
        self.weights.to_training()
        with self.clock.phase("evaluation"):
            return self.examples.evaluate(weight_version)


@frozen(kw_only=True, eq=False)
class AnswerObserver(HeldOutObserver):
    """Has the environment judge answers to held-out prompts, while the source of training samples rests."""

    evaluator: HeldOutEvaluator
    source: Source
    progress: Progress
    keep: Callable[[int, CollectedRollouts], None]
    """Called with the step and its answers."""

    def evaluate(self, step: int, weight_version: int) -> Mapping[str, float]:
        """See HeldOutObserver."""
        self.source.pause()
        if self.source.has_failed:
            self.weights.forget()
        with self.source.still():
            self.weights.refit(weight_version)
            start = time.perf_counter()
            metrics = self.weights.generating(
                lambda: self.evaluator.evaluate(weight_version, lambda answers: self.keep(step, answers)), weight_version
            )
        self.progress.phase("evaluation")
        seconds = time.perf_counter() - start
        self.clock.totals["evaluation"] += seconds
        self.progress.span(DRIVER, "evaluation", start, (seconds,))
        return metrics
