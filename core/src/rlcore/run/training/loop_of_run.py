"""Builds the loop of a run from its plan: what each part is made of, and who follows it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from attrs import frozen

from rlcore.run.execution.critic import Critic
from rlcore.run.execution.critic_residency import CriticResidency
from rlcore.run.interrupt import InterruptGuard
from rlcore.run.loop import Loop
from rlcore.run.plan.inputs import Inputs
from rlcore.run.plan.run_plan import RunPlan
from rlcore.run.protocols import CollectedRollouts, LoopObserver, LoopPosition, MetricsTo, Scorer, Source, WeightSync
from rlcore.run.report.progress import Progress
from rlcore.run.report.sinks import Sinks
from rlcore.run.report.timing import PhaseClock
from rlcore.run.rollout.collector import Replay
from rlcore.run.rollout.held_out import AnswerObserver, ExampleObserver
from rlcore.run.rollout.sources import ExampleSource, RolloutSource
from rlcore.run.storage.opened_reference import opened_reference
from rlcore.run.storage.rollout_files import RolloutFiles
from rlcore.run.storage.saver import ROLLOUTS, RunSaver, read_rollouts
from rlcore.run.train_step.held_out import HeldOutExamples
from rlcore.run.train_step.mismatch_monitor import DisagreementWriter, MismatchMonitor
from rlcore.run.train_step.per_dataset_metrics import PerDatasetMetrics
from rlcore.run.train_step.policy import PolicyLearner
from rlcore.run.train_step.reference import Reference, ReferenceScorer
from rlcore.run.train_step.rescoring import Rescorer
from rlcore.spi import CheckpointError
from rlcore.spi.execution import Backends


@frozen(kw_only=True, eq=False)
class LoopParts:
    """The parts of a run's loop, without its backends."""

    plan: RunPlan
    inputs: Inputs
    saver: RunSaver
    sinks: Sinks
    observers: Sequence[LoopObserver]
    """Those that outlive restarts of the workers."""
    replay: Replay | None
    """The run that it repeats; None where it repeats none."""
    progress: Progress
    clock: PhaseClock
    guard: InterruptGuard

    @contextmanager
    def loop(
        self, backends: Backends, weights: WeightSync, critic: Critic | None, position: LoopPosition, checkpoint: Path | None
    ) -> Iterator[Loop]:
        """The loop at a position, which is that of a checkpoint for a resumed run. What it opens is closed at the end."""
        plan, saver, clock = self.plan, self.saver, self.clock
        digest = saver.reference or saver.model
        with opened_reference(plan, backends, saver.directory.path, digest, self.progress.note) as reference:
            source = self.inputs.source(plan, backends.generator, clock, self.progress, self.replay, reference.on_tokens)
            _begin(source, position.step, checkpoint)
            per_dataset = _per_dataset(plan, backends, source)
            policy = PolicyLearner(
                trainer=backends.trainer,
                algorithm=plan.algorithm,
                reference=reference,
                monitor=self._mismatch_monitor(backends),
                clock=clock,
                has_dropout=plan.recipe.lora is not None and plan.recipe.lora.dropout > 0,
                samples_truncated=plan.recipe.rollout.truncates,
                num_warmup_steps=plan.critic_warmup_steps,
                on_logprobs=per_dataset[0].add if per_dataset else None,
            )
            try:
                yield Loop(
                    recipe=plan.recipe,
                    algorithm=plan.algorithm,
                    source=source,
                    scorers=self._scorers(backends, reference, critic),
                    learners=[policy] if critic is None else [policy, critic],
                    weights=weights,
                    saver=saver,
                    observers=[*per_dataset, *self._files(source), *self._held_out(backends, weights, source), *self.observers],
                    progress=self.progress,
                    clock=clock,
                    guard=self.guard,
                    position=position,
                )
            finally:
                source.close()

    def _scorers(self, backends: Backends, reference: Reference, critic: Critic | None) -> list[Scorer]:
        needs, scorers = self.plan.algorithm.needs, list[Scorer]()
        if needs.source == "rollouts":
            scorers.append(Rescorer(trainer=backends.trainer, clock=self.clock))
        if needs.reference_logprobs_in_rollouts:
            scorers.append(ReferenceScorer(reference=reference, clock=self.clock))
        return scorers if critic is None else [*scorers, critic]

    def _mismatch_monitor(self, backends: Backends) -> MismatchMonitor:
        options = self.plan.recipe.training
        return MismatchMonitor(
            trainer=backends.trainer,
            writer=next((one for one in self.observers if isinstance(one, DisagreementWriter)), None),
            progress=self.progress,
            warn_above=options.warn_token_mult_prob_error,
            end_above=options.max_token_mult_prob_error,
        )

    def _files(self, source: Source) -> Iterator[LoopObserver]:
        """Who keeps samples and metrics, in this order: metrics.jsonl has a step before trackers and displays show it."""
        if isinstance(source, RolloutSource):
            yield RolloutFiles(source=source, saver=self.saver, sinks=self.sinks, options=self.plan.recipe.logging)
        for write in (self.saver.save_metrics, self.sinks.log, self.progress.step):
            yield MetricsTo(write=write)

    def _held_out(self, backends: Backends, weights: WeightSync, source: Source) -> Iterator[LoopObserver]:
        """Who measures held-out rows: the algorithm itself, or an environment that judges answers."""
        recipe, inputs = self.plan.recipe, self.inputs
        if inputs.held_out is not None:
            examples = HeldOutExamples.of(inputs.held_out, inputs.measured, self.plan.algorithm, backends, inputs.measured_sets)
            yield ExampleObserver(recipe=recipe, weights=weights, clock=self.clock, examples=examples)
            return
        evaluator = inputs.evaluator(recipe, backends.generator, PhaseClock(self.progress), self.progress)
        if evaluator is not None and recipe.evaluates:
            yield AnswerObserver(
                recipe=recipe,
                weights=weights,
                clock=self.clock,
                evaluator=evaluator,
                source=source,
                progress=self.progress,
                keep=self.saver.save_answers if recipe.logging.evaluation_answers else _drop_answers,
            )


def critic_of(plan: RunPlan, backends: Backends, clock: PhaseClock) -> Critic | None:
    """The critic on a run's backends; None where none is trained."""
    if backends.critic is None:
        return None
    return Critic(
        group=backends.critic,
        residency=CriticResidency.of(plan, backends.critic, clock),
        clock=clock,
        num_warmup_updates=plan.critic_warmup_steps * plan.recipe.training.minibatches_per_step,
    )


def _begin(source: Source, step: int, checkpoint: Path | None) -> None:
    """Begin behind a step, with what was under way when a checkpoint was written."""
    saved = None if checkpoint is None else read_rollouts(checkpoint)
    try:
        source.begin(step, saved)
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint}/{ROLLOUTS}: {error}") from error


def _per_dataset(plan: RunPlan, backends: Backends, source: Source) -> list[PerDatasetMetrics]:
    """Who measures each of several data sets, where that can be done."""
    if not isinstance(source, ExampleSource) or source.names_of is None:
        return []
    if not PerDatasetMetrics.are_measurable(plan.algorithm, backends.trainer):
        return []
    return [PerDatasetMetrics(algorithm=plan.algorithm, sets_of=source.sets_of_examples)]


def _drop_answers(step: int, answers: CollectedRollouts) -> None:
    """Keep no answers."""
