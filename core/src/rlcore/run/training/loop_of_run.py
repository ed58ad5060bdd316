"""Builds the loop of a run from its plan: what each part is made of, and who follows it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from attrs import frozen

from rlcore.registry.algorithm_handle import AlgorithmState
from rlcore.registry.run_parts import only_function
from rlcore.run.data.rows_digest import RowDigests
from rlcore.run.execution.critic import Critic, CriticResidency
from rlcore.run.interrupt import InterruptGuard
from rlcore.run.loop import Loop
from rlcore.run.plan.collector import LoopContext
from rlcore.run.plan.inputs import Inputs
from rlcore.run.plan.run_plan import RunPlan
from rlcore.run.protocols import LoopObserver, LoopPosition, MetricsTo, Source, WeightSync
from rlcore.run.report.metrics_file import append_metrics
from rlcore.run.report.progress import Progress
from rlcore.run.report.sinks import Sinks
from rlcore.run.report.timing import PhaseClock
from rlcore.run.storage.run_directory import RunDirectory
from rlcore.run.storage.saver import ROLLOUTS, RunSaver, read_rollouts
from rlcore.run.train_step.held_out import ExampleObserver, ExampleSource, HeldOutExamples
from rlcore.run.train_step.metrics import PerDatasetMetrics
from rlcore.run.train_step.mismatch_monitor import DisagreementWriter, MismatchMonitor
from rlcore.run.train_step.policy import PolicyLearner
from rlcore.run.train_step.scorers import OnTokens, Reference, scorers_of
from rlcore.spi import CheckpointError
from rlcore.spi.execution import Backends


@frozen(kw_only=True, eq=False)
class TrainingRun:
    """The state of a run that outlives restarts of its workers."""

    plan: RunPlan
    inputs: Inputs
    digests: RowDigests
    """The digests that LoopState keeps as `data`."""
    directory: RunDirectory
    sinks: Sinks
    observers: Sequence[LoopObserver]
    progress: Progress
    start: float
    """When it began, by time.perf_counter."""
    allow_changes: bool
    """True where a recipe that makes another run may be resumed with."""
    initial_state: AlgorithmState | None
    """The algorithm's state before the first step; None where it keeps none."""
    clock: PhaseClock
    guard: InterruptGuard

    @contextmanager
    def loop(
        self,
        saver: RunSaver,
        backends: Backends,
        weights: WeightSync,
        critic: Critic | None,
        position: LoopPosition,
        checkpoint: Path | None,
    ) -> Iterator[Loop]:
        """The loop at a position, which is that of a checkpoint for a resumed run. What it opens is closed at the end."""
        plan, clock = self.plan, self.clock
        log = partial(append_metrics, self.directory.metrics_file)
        digest = saver.reference or saver.model
        with opened_reference(plan, backends, self.directory.path, digest, self.progress.note) as reference, saver.thread:
            collecting = self._collecting(backends, weights, reference.on_tokens)
            source = self.inputs.source(collecting)
            _begin(source, position.step, checkpoint)
            per_dataset, critics = _per_dataset(plan, backends, source), [] if critic is None else [critic]
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
                    scorers=[*scorers_of(plan.algorithm, reference, backends.trainer, clock), *critics],
                    learners=[policy, *critics],
                    weights=weights,
                    saver=saver,
                    observers=[
                        *per_dataset,
                        *self._of_samples(source, collecting),
                        # metrics.jsonl has a step before trackers and displays show it.
                        *(MetricsTo(write=write) for write in (log, self.sinks.log, self.progress.step)),
                        *self._held_out_examples(backends, weights),
                        *self.observers,
                    ],
                    progress=self.progress,
                    clock=clock,
                    guard=self.guard,
                    position=position,
                )
            finally:
                source.close()

    def _mismatch_monitor(self, backends: Backends) -> MismatchMonitor:
        options = self.plan.recipe.training
        return MismatchMonitor(
            trainer=backends.trainer,
            writer=next((one for one in self.observers if isinstance(one, DisagreementWriter)), None),
            progress=self.progress,
            warn_above=options.warn_token_mult_prob_error,
            end_above=options.max_token_mult_prob_error,
        )

    def _collecting(self, backends: Backends, weights: WeightSync, on_tokens: OnTokens | None) -> LoopContext | None:
        """The loop as the collector finds it; None where nothing generates."""
        if backends.generator is None:
            return None
        return LoopContext(
            generator=backends.generator,
            weights=weights,
            directory=self.directory.path,
            sinks=self.sinks,
            clock=self.clock,
            progress=self.progress,
            on_tokens=on_tokens,
        )

    def _of_samples(self, source: Source, collecting: LoopContext | None) -> Iterable[LoopObserver]:
        """Return the observers that keep samples and have an environment judge answers to held-out rows."""
        inputs = self.inputs
        if inputs.collector is None or collecting is None:
            return ()
        is_judged = self.plan.recipe.evaluates and inputs.held_out is None
        return inputs.collector.observers(source, inputs.held_out_prompts if is_judged else None, collecting)

    def _held_out_examples(self, backends: Backends, weights: WeightSync) -> Iterator[LoopObserver]:
        """Return the observers that have the algorithm measure held-out rows."""
        inputs = self.inputs
        if inputs.held_out is not None:
            examples = HeldOutExamples.of(inputs.held_out, inputs.measured, self.plan.algorithm, backends, inputs.measured_sets)
            yield ExampleObserver(recipe=self.plan.recipe, weights=weights, clock=self.clock, examples=examples)


def critic_of(plan: RunPlan, backends: Backends, clock: PhaseClock) -> Critic | None:
    """The critic on a run's backends; None where none is trained."""
    if backends.critic is None:
        return None
    return Critic(
        group=backends.critic,
        residency=CriticResidency.of(plan, backends.critic, clock),
        clock=clock,
        num_warmup_updates=plan.critic_warmup_steps * plan.recipe.training.updates_per_step,
    )


def _begin(source: Source, step: int, checkpoint: Path | None) -> None:
    """Begin behind a step, with what was under way when a checkpoint was written."""
    saved = None if checkpoint is None else read_rollouts(checkpoint)
    try:
        source.begin(step, saved)
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint}/{ROLLOUTS}: {error}") from error


def _per_dataset(plan: RunPlan, backends: Backends, source: Source) -> list[PerDatasetMetrics]:
    """Return the observers that measure each of several data sets, where that can be done."""
    if not isinstance(source, ExampleSource) or source.names_of is None:
        return []
    if not PerDatasetMetrics.are_measurable(plan.algorithm, backends.trainer):
        return []
    return [PerDatasetMetrics(algorithm=plan.algorithm, sets_of=source.sets_of_examples)]


@contextmanager
def opened_reference(
    plan: RunPlan, backends: Backends, directory: Path, model_digest: str, note: Callable[[str], None]
) -> Iterator[Reference]:
    """Yield the reference of a run's backends, whose model has that digest. PluginError where the cache is not usable."""
    reference = Reference.of(backends)
    cache = only_function("reference_cache") if plan.algorithm.needs.reference_logprobs else None
    if cache is None or cache.function is None:
        yield reference
        return
    with cache.function(plan, reference, directory=directory, model_digest=model_digest, note=note) as cached:
        yield cached
