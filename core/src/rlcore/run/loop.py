"""The loop: data → rollouts → algorithm → minibatches → train_step → refit, with evaluation, checkpoints and metrics.

Each stage hands explicit weight versions to the next: rollouts carry the version that sampled them, updates name the version
they start from, and a refit counts once the generator has acknowledged it.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import numpy as np
from attrs import evolve, field, frozen

from rlcore import spi
from rlcore.config.recipe import Recipe
from rlcore.registry.algorithm_handle import AlgorithmHandle
from rlcore.run.checkpoint_evaluation.evaluations import CheckpointEvaluations
from rlcore.run.execution.critic import Critic
from rlcore.run.execution.refit import Refitter
from rlcore.run.execution.residency import Residency
from rlcore.run.interrupt import InterruptGuard
from rlcore.run.protocols import CollectedRollouts, LoopPosition
from rlcore.run.report.progress import Progress
from rlcore.run.report.sinks import Sinks
from rlcore.run.report.timeline import DRIVER
from rlcore.run.report.timing import PhaseClock, idle_seconds
from rlcore.run.rollout.metrics import rollout_metrics, throughput_metrics
from rlcore.run.rollout.sources import HeldOutEvaluator, Source
from rlcore.run.storage.reference_store import ReferenceStore
from rlcore.run.storage.saver import RunSaver
from rlcore.run.train_step.held_out import HeldOutExamples
from rlcore.run.train_step.metrics import training_metrics
from rlcore.run.train_step.minibatches import minibatches_of
from rlcore.run.train_step.mismatch import mismatch_metrics
from rlcore.run.train_step.mismatch_monitor import MismatchMonitor
from rlcore.run.train_step.per_dataset_metrics import PerDatasetMetrics
from rlcore.run.train_step.reference import Reference
from rlcore.run.train_step.rescoring import rescored
from rlcore.spi.arrays import Float32Array
from rlcore.spi.execution import LogprobsColumn, Minibatch, TrainerGroup

ResultT = TypeVar("ResultT")


@frozen(kw_only=True, eq=False)
class Loop:
    """The training loop, in the driver process. Trainer and generator may be groups of workers."""

    recipe: Recipe
    algorithm: AlgorithmHandle
    trainer: TrainerGroup
    source: Source
    refitter: Refitter | None
    """None where no generator runs."""
    residency: Residency | None
    """None where trainer and generator share no device's memory."""
    evaluator: HeldOutEvaluator | None
    """None where no held-out answers are generated and judged."""
    saver: RunSaver
    sinks: Sinks
    progress: Progress
    clock: PhaseClock
    guard: InterruptGuard
    position: LoopPosition
    reference: Reference
    """What the algorithm compares the policy with, where it does."""
    critic: Critic | None = None
    """None where the algorithm trains none."""
    held_out: HeldOutExamples | None = None
    """None where no held-out examples are measured."""
    checkpoint_evaluations: CheckpointEvaluations | None = None
    """None where no program measures checkpoints."""
    reference_store: ReferenceStore | None = None
    """Where the reference's log-probabilities are kept; None where each step has samples of its own."""
    mismatch_monitor: MismatchMonitor = field(init=False)

    @mismatch_monitor.default
    def _mismatch_monitor(self) -> MismatchMonitor:
        options = self.recipe.training
        return MismatchMonitor(
            trainer=self.trainer,
            writer=self.saver,
            progress=self.progress,
            warn_above=options.warn_token_mult_prob_error,
            end_above=options.max_token_mult_prob_error,
        )

    def run(self) -> None:
        """Run the steps from the present position to the last one."""
        recipe, position = self.recipe, self.position
        position.algorithm_state = self.algorithm.save_state()
        is_measured = self.evaluator is not None or self.held_out is not None
        if position.step == 0 and recipe.evaluation.at_start and is_measured:
            self._log(0, self._evaluate())
        if position.unlogged is not None:  # saved after the step's updates, before its end
            with self.guard.deferred():
                self._end_step(position.unlogged)
        if position.saved_step == position.step:
            self._evaluate_checkpoint()  # of a run that was killed in between
        self._report_checkpoints(wait=False)
        while position.step < recipe.run.num_steps:
            self.clock.begin_step()
            samples = self._sample(position.step + 1)
            if samples is None:
                continue  # interrupted, which ended the part that it was deferred in
            # From the first update to the metrics' line all belongs to one step: an interrupt waits for its end.
            with self.guard.deferred():
                position.unlogged = self._update(position.step + 1, samples)
                if (record := self.source.recorded()) is not None:
                    self.saver.save_schedule(record)  # before the step counts, so that no checkpoint of it is without
                position.step, position.step_version = position.step + 1, position.weight_version
                position.step_critic_version = position.critic_version
                self.source.trained()
                position.algorithm_state = self.algorithm.save_state()
                self._end_step(position.unlogged)
            self._report_checkpoints(wait=False)
        self._report_checkpoints(wait=True)

    def save(self, *, prune: bool = True) -> None:
        """Save a checkpoint of the present position."""
        self.make_room_to_save()
        with self.guard.deferred(), self.clock.phase("checkpoint"):
            self.source.pause()
            self.saver.save(self.position, self.source.state(), prune=prune)
        self.position.saved_step = self.position.step

    def make_room_to_save(self) -> None:
        """Saving brings back what of trainer or critic is away, where the generator has its memory."""
        critic_moves = self.critic is not None and self.critic.residency.moves
        if self.residency is not None and (self.residency.offload_trainer != "none" or critic_moves):
            self._to_training()

    def _end_step(self, metrics: dict[str, float]) -> None:
        """What follows a step's updates: evaluation, the metrics' line, a checkpoint."""
        recipe = self.recipe
        last = self.position.step == recipe.run.num_steps
        if self._is_due(recipe.evaluation.every_n_steps, recipe.evaluation.at_end and last):
            metrics = metrics | self._evaluate()
        self._log(self.position.step, metrics)
        self.position.unlogged = None
        if self._is_due(recipe.checkpoint.every_n_steps, recipe.checkpoint.at_end and last):
            self.save()
            self._evaluate_checkpoint()

    def _evaluate_checkpoint(self) -> None:
        """Have the checkpoint that was just saved measured, if it is due, by a model exported for that alone."""
        evaluations, step = self.checkpoint_evaluations, self.position.step
        if evaluations is not None and evaluations.wants(step):
            self.make_room_to_save()
            with self.guard.deferred(), self.clock.phase("checkpoint"):
                evaluations.saved(step, self.saver.export_to)

    def _report_checkpoints(self, *, wait: bool) -> None:
        """Hand on what programs have measured; an interrupt may end the waiting."""
        evaluations = self.checkpoint_evaluations
        if evaluations is None:
            return
        with self.guard.deferred():
            evaluations.report()
        while (wait or evaluations.waits) and evaluations.are_under_way:
            with self.clock.phase("evaluation"):
                evaluations.wait_for_one()
            with self.guard.deferred():
                evaluations.report()

    def _is_due(self, every: int, otherwise: bool) -> bool:
        return otherwise or (every > 0 and self.position.step % every == 0)

    def _sample(self, step: int) -> spi.RolloutBatch | None:
        """A step's samples; None where an interrupt came first. Samples that later steps can train on are not to be lost: an
        interrupt then waits until the generator has given back what it has."""
        sample = partial(self.source.sample, step, self.position.weight_version)
        if self.algorithm.needs.source != "rollouts":
            return sample()
        if not self.recipe.async_.max_staleness:
            return self._generating(sample)
        with self.guard.deferred():
            return self._generating(lambda: sample(may_go_on=lambda: not self.guard.pressed))

    def _update(self, step: int, samples: spi.RolloutBatch) -> dict[str, float]:
        """Train on the samples; the step's metrics."""
        generated = samples if isinstance(samples, CollectedRollouts) else None
        if isinstance(samples, CollectedRollouts) and samples.oldest_version:
            self._to_training()
            with self.clock.phase("logprobs"):
                samples = rescored(samples, self.trainer)
        if self.algorithm.needs.reference_logprobs_in_rollouts:
            self._to_training()
            samples = evolve(samples, batch=self._with_reference(samples.batch))
        if self.critic is not None:
            self._to_training()
            samples = evolve(samples, batch=self.critic.with_values(samples.batch, self.position))
        training = self.algorithm.build_batch(samples)
        self._to_training()
        of_sets = self._per_dataset_metrics(samples, step)
        results, of_critic = self._train(training, step, of_sets)
        collected = samples if isinstance(samples, CollectedRollouts) else None
        if collected is not None:
            self._refit()
        times = self.clock.end_step()
        times |= idle_seconds(times, self.source.generating_s())
        metrics = {} if collected is None else rollout_metrics(collected)
        metrics |= {**training.metrics, **training_metrics(results), **of_critic}
        metrics |= {} if of_sets is None else of_sets.metrics()
        metrics |= {"weight_version": float(self.position.weight_version), "updates": float(len(results))}
        metrics |= throughput_metrics(samples, times["time/total_s"])
        metrics |= {} if self.residency is None else self.residency.metrics
        metrics |= {} if self.refitter is None else self.refitter.take_metrics()
        every = self.recipe.logging.rollouts_every_n_steps
        if generated is not None and every > 0 and step % every == 0:
            self.saver.save_rollouts(step, generated, training.batch)
        every = self.recipe.logging.samples_every_n_steps
        if generated is not None and every > 0 and step % every == 0 and self.sinks.take_samples:
            number = self.recipe.logging.samples
            self.sinks.log_samples(step, self.saver.samples(generated, training.batch, number))
        return metrics | times

    def _per_dataset_metrics(self, samples: spi.RolloutBatch, step: int) -> PerDatasetMetrics | None:
        """What gathers the figures of each of several data sets; None where there is one, or where these need more than the
        log-probabilities that an update can return."""
        needs, sets = self.algorithm.needs, self.source.sets_of_examples(step)
        can_return = self.trainer.has(spi.capabilities.STEP_LOGPROBS) and needs.head == "tokens"
        if not sets or not self.algorithm.measures or not can_return or needs.reference_logprobs:
            return None
        return PerDatasetMetrics(algorithm=self.algorithm, samples=samples, sets=sets)

    def _train(
        self, training: spi.TrainingBatch, step: int, of_sets: PerDatasetMetrics | None
    ) -> tuple[list[spi.TrainStepResult], Mapping[str, float]]:
        """Make all updates of a step; none where there is nothing to learn from. The results of the policy's, and figures of
        the critic's. Those come last: what refuses the policy's first update then leaves the step as it was."""
        reason, minibatches = training.no_signal, list[Minibatch]()
        if reason is None and not training.batch.loss_mask.any():
            reason = "no token takes part in the loss"
        if reason is None:
            minibatches = minibatches_of(training, self.recipe, step)
            reason = None if minibatches else "no sequence that takes part in the loss has a signal"
        if reason is not None:
            self._without_signal(reason, step)
            return [], {}
        warms_up = self.recipe.critic is not None and step <= self.recipe.critic.warmup_steps
        results = [] if warms_up else self._train_policy(minibatches, training.loss, step, of_sets)
        if self.critic is None or training.critic_loss is None:
            return results, {}
        return results, self.critic.train(minibatches, training.critic_loss, self.position)

    def _train_policy(
        self, minibatches: Sequence[Minibatch], spec: spi.LossSpec, step: int, of_sets: PerDatasetMetrics | None
    ) -> list[spi.TrainStepResult]:
        """An update on each minibatch."""
        (first, loss), *later = self._with_logprobs(minibatches, spec)
        compared: Minibatch | None = None
        is_one_distribution = not self.recipe.rollout.truncates or first.batch.sampling_mask is not None
        if self.algorithm.needs.source == "rollouts" and is_one_distribution:
            # The first update sees the weights that generated.
            compared = self.mismatch_monitor.comparable(first, self.position.weight_version)
        found: Mapping[str, float] = {}
        if compared is not None and self._drops:
            with self.clock.phase("logprobs"):
                version, is_part = self.position.weight_version, compared is not first
                found = self.mismatch_monitor.compare(step, compared, version, is_part=is_part)
            compared = None
        result = self._train_step(step, first, loss, compared, of_sets)
        results = [evolve(result, metrics={**result.metrics, **found})]
        return results + [self._train_step(step, minibatch, loss, None, of_sets) for minibatch, loss in later]

    @property
    def _drops(self) -> bool:
        """Whether a train step's own log-probabilities are those of a policy with dropout, which nothing samples from."""
        return self.recipe.lora is not None and self.recipe.lora.dropout > 0

    def _train_step(
        self,
        step: int,
        minibatch: Minibatch,
        loss: spi.LossSpec,
        compared: Minibatch | None,
        of_sets: PerDatasetMetrics | None,
    ) -> spi.TrainStepResult:
        """One update. RefitError where generator and trainer turn out to be too far apart on `compared`: the minibatch itself,
        or one with some of its loss tokens alone."""
        version, monitor = self.position.weight_version, self.mismatch_monitor
        bounds: Mapping[str, float] = {}
        wants_logprobs = compared is not None or of_sets is not None
        if compared is minibatch:
            columns = tuple(dict.fromkeys([*loss.token_columns, spi.GENERATION_LOGPROBS]))
            loss = evolve(loss, token_columns=columns, generation_mismatch=True)
            bounds, wants_logprobs = monitor.bounds, monitor.wants_logprobs
        try:
            with self.clock.phase("train"):
                result, logprobs = self.trainer.train_step(minibatch, loss, version, bounds=bounds, logprobs=wants_logprobs)
        except spi.BoundError as error:
            monitor.judge_refusal(step, minibatch, version, error)
            raise
        self.position.weight_version = result.weight_version
        if of_sets is not None and logprobs is not None:
            of_sets.add(minibatch.sequences, logprobs)
        if compared is not None:
            if compared is not minibatch and logprobs is not None:
                found = mismatch_metrics(compared.batch, compared.sequences, logprobs)
                result = evolve(result, metrics={**result.metrics, **found})
            monitor.judge(step, compared, result, logprobs)
        return result

    def _without_signal(self, reason: str, step: int) -> None:
        message = f"step {step} has nothing to learn from: {reason}"
        if self.recipe.training.on_no_signal == "error":
            remedy = "Make the tasks easier or harder, raise rollout.samples_per_prompt, or set training.on_no_signal=skip."
            raise spi.RewardError(f"{message}. {remedy}")
        self.progress.note(f"{message}; no update was made")

    def _with_logprobs(self, minibatches: Sequence[Minibatch], loss: spi.LossSpec) -> list[tuple[Minibatch, spi.LossSpec]]:
        """Each minibatch and the loss on it, with the trainer's log-probabilities that the algorithm needs."""
        needs, version = self.algorithm.needs, self.position.weight_version
        batch, columns, wanted = minibatches[0].batch, list(loss.token_columns), list[LogprobsColumn]()
        if needs.reference_logprobs and not needs.reference_logprobs_in_rollouts:
            columns.append(spi.REFERENCE_LOGPROBS)
            if self.reference_store is None and self.reference.is_beside(self.trainer):
                wanted.append(LogprobsColumn(name=spi.REFERENCE_LOGPROBS, model="reference"))
            else:
                batch = self._with_reference(batch)
        first = later = evolve(loss, token_columns=tuple(dict.fromkeys(columns)))
        num_own = 0 if self._drops else 1
        if num_own and needs.head == "tokens" and self.trainer.has(spi.capabilities.PREVIOUS_LOGPROBS):
            # The first update's own forward pass sees the very weights that are meant.
            first = evolve(first, previous_logprobs="unchanged")
        if needs.previous_logprobs and len(minibatches) > num_own:
            wanted.append(LogprobsColumn(name=spi.PREVIOUS_LOGPROBS, model="policy", first=num_own))
            columns.append(spi.PREVIOUS_LOGPROBS)
            later = evolve(loss, token_columns=tuple(dict.fromkeys(columns)), previous_logprobs="given")
        found = [evolve(minibatch, batch=batch) for minibatch in minibatches]
        if wanted:
            with self.clock.phase("logprobs"):
                found = self.trainer.with_logprobs(found, wanted, columns, version)
        return [(minibatch, later if number >= num_own else first) for number, minibatch in enumerate(found)]

    def _with_reference(self, batch: spi.TokenBatch) -> spi.TokenBatch:
        """The batch with the reference policy's log-probabilities of all tokens."""
        with self.clock.phase("logprobs"):
            return batch.with_token_column(spi.REFERENCE_LOGPROBS, self._reference_logprobs(batch))

    def _reference_logprobs(self, batch: spi.TokenBatch) -> Float32Array:
        """float32 [T]: computed where they are not kept from an earlier step."""
        compute = partial(self.reference.logprobs, batch, weight_version=self.position.weight_version)
        if self.reference_store is None:
            return compute(np.arange(batch.num_sequences))
        return self.reference_store.logprobs(batch, compute)

    def _refit(self) -> None:
        """Wake the generator and sync its weights. Interrupts are deferred: half-moved memory cannot be saved."""
        if self.refitter is None:
            return
        if self.refitter.version != self.position.weight_version:
            self.source.make_way()
        with self.guard.deferred():
            if self.residency is None:
                self.refitter.refit(self.position.weight_version)
            else:
                self.residency.to_generation(self.refitter, self.position.weight_version)

    def _to_training(self) -> None:
        """Move trainer and generator to where the trainer can work."""
        if self.residency is not None and self.residency.to_training() and self.refitter is not None:
            self.refitter.version = -1

    def _generating(self, generate: Callable[[], ResultT]) -> ResultT:
        """What `generate` returns at the trainer's weights."""
        assert self.refitter is not None, "what generates is refitted"
        return self.refitter.generating(generate, self._refit)

    def _evaluate(self) -> dict[str, float]:
        if self.held_out is not None:
            self._to_training()
            with self.clock.phase("evaluation"):
                return self.held_out.evaluate(self.position.weight_version)
        if self.evaluator is None:
            return {}
        evaluator, version = self.evaluator, self.position.weight_version
        keep = partial(self.saver.save_answers, self.position.step) if self.recipe.logging.evaluation_answers else None
        self.source.pause()
        if self.source.has_failed and self.refitter is not None:
            self.refitter.version = -1
        with self.source.still():
            self._refit()
            start = time.perf_counter()
            metrics = self._generating(lambda: evaluator.evaluate(version, keep))
        self.progress.phase("evaluation")
        seconds = time.perf_counter() - start
        self.clock.totals["evaluation"] += seconds
        self.progress.span(DRIVER, "evaluation", start, (seconds,))
        return metrics

    def _log(self, step: int, metrics: dict[str, float]) -> None:
        self.saver.save_metrics(step, metrics)
        self.sinks.log(step, metrics)
        self.progress.step(step, metrics)
