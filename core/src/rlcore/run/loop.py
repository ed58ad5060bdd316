"""The loop: collect, score, advantages, train step, refit, log.

Each stage hands explicit weight versions to the next: rollouts carry the version that sampled them, updates name the version
they start from, and a refit counts once the generator has acknowledged it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from attrs import frozen

from rlcore import spi
from rlcore.config.recipe import Recipe
from rlcore.registry.algorithm_handle import AlgorithmHandle
from rlcore.run.interrupt import InterruptGuard
from rlcore.run.protocols import Learner, LoopObserver, LoopPosition, Saver, Scorer, Source, TrainedStep, WeightSync
from rlcore.run.report.progress import Progress
from rlcore.run.report.timing import PhaseClock, idle_seconds
from rlcore.run.train_step.metrics import sample_metrics, throughput_metrics
from rlcore.run.train_step.minibatches import minibatches_with_signal


@frozen(kw_only=True, eq=False)
class Loop:
    """The training loop, in the driver's process. Each part is one object, whatever number of processes stands behind it."""

    recipe: Recipe
    algorithm: AlgorithmHandle
    source: Source
    scorers: Sequence[Scorer]
    """Columns that the algorithm reads before it computes advantages, in this order."""
    learners: Sequence[Learner]
    """The policy, and behind it the critic: what refuses the policy's first update leaves the step as it was."""
    weights: WeightSync
    saver: Saver
    observers: Sequence[LoopObserver]
    progress: Progress
    clock: PhaseClock
    guard: InterruptGuard
    position: LoopPosition

    def run(self) -> None:
        """Run the steps from the present position to the last one."""
        position = self.position
        self._begin()
        while position.step < self.recipe.run.num_steps:
            self.clock.begin_step()
            samples = self._collect(position.step + 1)
            if samples is None:
                continue  # interrupted, which ended the part that it was deferred in
            # From the first update to the metrics' line all belongs to one step: an interrupt waits for its end.
            with self.guard.deferred():
                scored = self._score(samples)
                training = self.algorithm.build_batch(scored)  # advantages, and the loss that reads them
                step = TrainedStep(step=position.step + 1, sampled=samples, scored=scored, trained=training.batch)
                figures = self._update(step, training)
                if self.source.generates:  # for the next step
                    self.weights.refit(position.weight_version, before_change=self.source.make_way)
                position.unlogged = self._metrics_of(step, {**training.metrics, **figures})
                position.count_step()
                self.source.trained()
                position.algorithm_state = self.algorithm.save_state()
                self._end_step(position.unlogged)
            self._between_steps()
        for observer in self.observers:
            observer.on_last_step()

    def save(self, *, prune: bool = True) -> None:
        """Write a checkpoint of the present position, which is completed while the run goes on."""
        self.weights.make_room_to_save()
        with self.guard.deferred(), self.clock.phase("checkpoint"):
            self.await_checkpoint()
            self.source.pause()
            self.saver.save(self.position, self.source.state(), prune=prune)

    def await_checkpoint(self, *, wait: bool = True) -> None:
        """Note the last checkpoint as saved once it is complete. Raises what made it fail."""
        step = self.saver.completed(wait=wait)
        self.position.saved_step = self.position.saved_step if step is None else step

    def _begin(self) -> None:
        """Do what a run that ended here had left undone."""
        position = self.position
        for observer in self.observers:
            observer.on_start(position.step)
        position.algorithm_state = self.algorithm.save_state()
        if position.step == 0 and (figures := self._measure()):
            self._log(figures)
        if position.unlogged is not None:  # saved after the step's updates, before its end
            with self.guard.deferred():
                self._end_step(position.unlogged)
        if position.saved_step == position.step:
            self._checkpoint_saved()  # of a run that was killed in between
        self._between_steps()

    def _collect(self, step: int) -> spi.RolloutBatch | None:
        """A step's samples, made with the present weights; None where an interrupt came first."""
        version = self.position.weight_version
        with self.source.interruptible(self.guard) as may_go_on:
            if not self.source.generates:
                return self.source.sample(step, version, may_go_on)
            return self.weights.generating(
                lambda: self.source.sample(step, version, may_go_on), version, before_change=self.source.make_way
            )

    def _score(self, samples: spi.RolloutBatch) -> spi.RolloutBatch:
        """The samples with the columns that the algorithm reads."""
        for scorer in self.scorers:
            self.weights.to_training()
            samples = scorer.score(samples, self.position)
        return samples

    def _update(self, step: TrainedStep, training: spi.TrainingBatch) -> dict[str, float]:
        """Make all updates of a step; none where there is nothing to learn from."""
        self.weights.to_training()
        for observer in self.observers:
            observer.on_batch(step)
        first_version = self.position.weight_version
        figures: dict[str, float] = {}
        if minibatches := minibatches_with_signal(training, self.recipe, step.step, self.progress.note):
            for learner in self.learners:
                figures |= learner.train(step.step, minibatches, training, self.position)
        version = self.position.weight_version
        return figures | {"weight_version": float(version), "updates": float(version - first_version)}

    def _metrics_of(self, step: TrainedStep, figures: dict[str, float]) -> dict[str, float]:
        """Return the step's metrics for metrics.jsonl, without those of evaluations."""
        times = self.clock.end_step()
        times |= idle_seconds(times, self.source.generating_s())
        metrics = sample_metrics(step.scored) | figures | throughput_metrics(step.scored, times["time/total_s"])
        metrics |= self.weights.take_metrics()
        for observer in self.observers:
            metrics |= observer.on_step_trained(step)
        return metrics | times

    def _end_step(self, metrics: dict[str, float]) -> None:
        """End a step after its updates: evaluate, write the metrics' line, save a checkpoint."""
        options, step = self.recipe.checkpoint, self.position.step
        self._log(metrics | self._measure())
        self.position.unlogged = None
        is_last = step == self.recipe.run.num_steps
        if (options.at_end and is_last) or (options.every_n_steps > 0 and step % options.every_n_steps == 0):
            self.save()
            self._checkpoint_saved()

    def _measure(self) -> dict[str, float]:
        """The figures of the present weights that are due, such as those on held-out rows."""
        figures: dict[str, float] = {}
        for observer in self.observers:
            figures |= observer.on_measure(self.position.step, self.position.weight_version)
        return figures

    def _log(self, metrics: dict[str, float]) -> None:
        for observer in self.observers:
            observer.on_log(self.position.step, metrics)

    def _checkpoint_saved(self) -> None:
        with self.guard.deferred():
            if any(observer.reads_checkpoints for observer in self.observers):
                with self.clock.phase("checkpoint"):
                    self.await_checkpoint()
            for observer in self.observers:
                observer.on_checkpoint_saved(self.position.step, self._export)

    def _export(self, directory: Path, kind: Literal["hf", "peft"] = "hf") -> Path:
        self.weights.make_room_to_save()
        with self.clock.phase("checkpoint"):
            return self.saver.export_to(directory, kind)

    def _between_steps(self) -> None:
        with self.guard.deferred():  # or what was saved would be forgotten
            self.await_checkpoint(wait=False)
        for observer in self.observers:
            observer.on_idle()
