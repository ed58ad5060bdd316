"""`train`: build what a prepared recipe chose, run it, and leave a run directory behind."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from attrs import evolve, field, frozen

from rlcore.registry.algorithm_handle import AlgorithmState
from rlcore.registry.binding import build_sink
from rlcore.registry.plugin_errors import first_line
from rlcore.run.checkpoint_evaluation.evaluations import CheckpointEvaluations
from rlcore.run.data.rows_digest import RowDigests
from rlcore.run.data.tokenizer import Tokenizer
from rlcore.run.ending import describe_model, finish, run_to_end
from rlcore.run.execution.backends import execution
from rlcore.run.execution.critic import Critic
from rlcore.run.execution.critic_residency import CriticResidency
from rlcore.run.execution.refit import Refitter
from rlcore.run.execution.residency import Residency
from rlcore.run.interrupt import InterruptGuard, ended_by_sigterm
from rlcore.run.loop import Loop
from rlcore.run.plan.inputs import Inputs, load_inputs
from rlcore.run.plan.run_plan import RunPlan
from rlcore.run.plan.sections import plugin_config
from rlcore.run.protocols import LoopPosition
from rlcore.run.report.progress import Progress
from rlcore.run.report.recorded_progress import RecordedProgress
from rlcore.run.report.sinks import Sinks
from rlcore.run.report.timing import PhaseClock
from rlcore.run.rollout.rollout_trace import RolloutTrace
from rlcore.run.rollout.sources import Source
from rlcore.run.storage.hub_upload import upload
from rlcore.run.storage.reference_store import open_reference_store
from rlcore.run.storage.resuming import check_rows, find_checkpoint, newest, restore
from rlcore.run.storage.run_directory import RunDirectory
from rlcore.run.storage.saver import ROLLOUTS, RunSaver, read_rollouts
from rlcore.run.storage.schedule_file import read_replay
from rlcore.run.train_step.held_out import HeldOutExamples
from rlcore.run.train_step.reference import Reference
from rlcore.spi import CheckpointError, ConfigError, SinkContext, WorkerError
from rlcore.spi.execution import Backends, EngineLimitError, OpenBackends


def train(
    prepared: RunPlan,
    *,
    resume: bool,
    progress: Progress,
    tokenizer: Tokenizer | None = None,
    allow_changes: bool = False,
    replay_schedule: Path | None = None,
) -> dict[str, object]:
    """Run a recipe to its last step and return what summary.json holds.

    `resume` continues the run of the same name from its newest intact checkpoint; without it an existing run is an error.
    `allow_changes` resumes also where the recipe makes another run of it; every change is noted in any case.
    `replay_schedule` is the schedule.jsonl of a run of this recipe: each step then trains on the groups that it names, and each
    part of a sample is generated with the weights that it names; ConfigError where it is of another recipe, or damaged.
    `tokenizer` stands in for the model's own, in tests. Raises InterruptedRun after Ctrl-C, once a checkpoint is saved.
    """
    start = time.perf_counter()
    replayed = None if replay_schedule is None else read_replay(replay_schedule, prepared, resume=resume)
    directory, initial_state = RunDirectory.of(prepared.recipe.run), prepared.algorithm.save_state()
    starting = partial(find_checkpoint, prepared, directory, resume=resume, allow_changes=allow_changes)
    _ = starting(Progress().note)  # before anything is made there
    with ended_by_sigterm(), load_inputs(prepared, tokenizer) as inputs, directory.locked():
        checkpoint = starting(progress.note)  # once more: it might have been another's until now
        digests = inputs.train_digests()
        if checkpoint is not None:
            check_rows(checkpoint, digests, progress.note, allow_changes=allow_changes)
        prepared = evolve(prepared, continues=checkpoint is not None)
        for note in (*prepared.registry.warnings, *prepared.notes, *inputs.notes, *inputs.left_out):
            progress.note(note)
        if not resume:
            directory.begin(prepared, 0)
        with RecordedProgress(progress, status_file=directory.status_file, timeline_file=directory.timeline_file) as recorded:
            with (
                _open_sinks(prepared, directory.path, recorded) as sinks,
                _evaluations(prepared, directory, sinks, recorded) as evaluations,
                execution(prepared, inputs.tokenizer, directory.logs, recorded) as opened,
            ):
                run = _Run(
                    prepared=prepared,
                    inputs=inputs,
                    digests=digests,
                    directory=directory,
                    sinks=sinks,
                    evaluations=evaluations,
                    progress=recorded,
                    start=start,
                    allow_changes=allow_changes,
                    initial_state=initial_state,
                    replayed=replayed,
                    clock=PhaseClock(recorded),
                )
                summary = sinks.summary = _run_with_restarts(run, opened, resume, checkpoint)
            describe_model(prepared, directory, summary)
    progress.finished(summary)
    # Behind the end of the run, which is complete whatever becomes of this.
    if (repository := prepared.recipe.checkpoint.push_to_hub) is not None:
        progress.note(f"uploaded to {upload(Path(str(summary['model'])), repository)}")
    return summary


@contextmanager
def _open_sinks(prepared: RunPlan, directory: Path, progress: Progress) -> Iterator[Sinks]:
    """The recipe's sinks, closed however the run ends. What one raises while it is built passes through."""
    sinks = Sinks(progress)
    context = SinkContext(run_directory=directory.absolute(), run_name=prepared.recipe.run.name, recipe=prepared.resolved)
    try:
        for entry in prepared.sinks:
            sinks.add(entry.label, build_sink(entry, context, plugin_config(prepared.recipe, entry)))
        yield sinks
    finally:
        sinks.close()


@contextmanager
def _evaluations(
    prepared: RunPlan, directory: RunDirectory, sinks: Sinks, progress: Progress
) -> Iterator[CheckpointEvaluations | None]:
    """The evaluations of the run's checkpoints, none of which outlives it."""
    if prepared.recipe.checkpoint_evaluation is None:
        yield None
        return
    for label in sinks.without_evaluations:
        progress.note(f"{label} takes no figures of evaluated checkpoints; they are in metrics.jsonl")
    evaluations = CheckpointEvaluations(prepared.recipe, directory, sinks, progress)
    try:
        yield evaluations
    finally:
        evaluations.close()


@frozen(kw_only=True, eq=False)
class _Run:
    """What stays the same however often the workers are started anew."""

    prepared: RunPlan
    inputs: Inputs
    digests: RowDigests
    """What LoopState keeps as `data`."""
    directory: RunDirectory
    sinks: Sinks
    evaluations: CheckpointEvaluations | None
    """None where no program measures checkpoints."""
    progress: Progress
    start: float
    """When it began, by time.perf_counter."""
    allow_changes: bool
    """Whether a recipe that makes another run may be resumed with."""
    initial_state: AlgorithmState | None
    """What the algorithm keeps before the first step; None where it keeps nothing."""
    replayed: RolloutTrace | None
    """The schedule that it repeats; None where it has its own."""
    clock: PhaseClock
    guard: InterruptGuard = field(factory=InterruptGuard)


def _run_with_restarts(run: _Run, opened: OpenBackends, resume: bool, checkpoint: Path | None) -> dict[str, object]:
    """Run to the end. Workers that die or hang are started anew, and the run goes on from its newest checkpoint."""
    cluster = run.prepared.recipe.cluster
    max_restarts = 0 if cluster is None else cluster.max_restarts
    cause: WorkerError | None = None
    for restart in range(1, max_restarts + 2):
        try:
            with opened() as backends:
                return _run_once(run, backends, resume, checkpoint)
        except ConfigError as error:
            if cause is None:
                raise
            # The recipe has worked before: what it asks for is not there any more.
            problems = "\n".join(f"  - {problem}" for problem in error.problems)
            raise WorkerError(
                f"the workers could not be started anew:\n{problems}\nThey were to be, since: {first_line(cause)}"
            ) from error
        except WorkerError as error:
            if restart > max_restarts or run.guard.pressed or isinstance(error, EngineLimitError):
                if restart > max_restarts > 0:
                    error.add_note(f"The workers had been started anew {max_restarts} times (cluster.max_restarts).")
                raise
            run.progress.note(f"restart {restart} of {max_restarts}, from the newest checkpoint: {first_line(error)}")
            cause, resume = error, True
            checkpoint = newest(run.directory, run.progress.note)  # of this very run: its recipe is looked at no more
    raise AssertionError("unreachable: the last attempt returns or raises")


def _begin(source: Source, step: int, checkpoint: Path | None) -> None:
    """Begin behind a step, with what was under way when a checkpoint was written."""
    saved = None if checkpoint is None else read_rollouts(checkpoint)
    try:
        source.begin(step, saved)
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint}/{ROLLOUTS}: {error}") from error


def _run_once(run: _Run, backends: Backends, resume: bool, checkpoint: Path | None) -> dict[str, object]:
    """Run the loop from a checkpoint, or from the beginning, to its end."""
    prepared, inputs, directory, progress = run.prepared, run.inputs, run.directory, run.progress
    recipe, algorithm, generator = prepared.recipe, prepared.algorithm, backends.generator
    saver = RunSaver(plan=prepared, backends=backends, tokenizer=inputs.tokenizer, directory=directory, digests=run.digests)
    position, critic = LoopPosition(), _critic(run, backends)
    residency = Residency.of(prepared, backends, run.clock, None if critic is None else critic.residency.make_room)
    if resume:
        if residency is not None:
            residency.to_training()  # what is loaded has to be somewhere
        position = restore(saver, algorithm, checkpoint, initial_state=run.initial_state, allow_changes=run.allow_changes)
        directory.begin(prepared, position.step)
    if run.evaluations is not None:
        run.evaluations.begin(position.step)
    with (
        open_reference_store(prepared, directory.path, saver.reference or saver.model, progress.note) as reference_store,
        Reference.opened(backends, prepared.reference_keeps) as reference,
    ):
        on_tokens = None if reference.ahead is None else reference.ahead.add
        source = inputs.source(prepared, generator, run.clock, progress, run.replayed, on_tokens)
        _begin(source, position.step, checkpoint if resume else None)
        loop = Loop(
            recipe=recipe,
            algorithm=algorithm,
            trainer=backends.trainer,
            source=source,
            refitter=Refitter.of(prepared, backends, run.clock, progress),
            residency=residency,
            critic=critic,
            evaluator=inputs.evaluator(recipe, generator, PhaseClock(progress), progress) if recipe.evaluates else None,
            saver=saver,
            sinks=run.sinks,
            progress=progress,
            clock=run.clock,
            guard=run.guard,
            position=position,
            held_out=None
            if inputs.held_out is None
            else HeldOutExamples.of(inputs.held_out, inputs.measured, algorithm, backends, inputs.measured_sets),
            checkpoint_evaluations=run.evaluations,
            reference=reference,
            reference_store=reference_store,
        )
        run.clock.totals.setdefault("setup", time.perf_counter() - run.start)
        progress.started(directory.path, position.step, recipe.run.num_steps)
        try:
            run_to_end(loop)
        finally:
            source.close()
    return finish(loop, time.perf_counter() - run.start)


def _critic(run: _Run, backends: Backends) -> Critic | None:
    plan = run.prepared
    if backends.critic is None:
        return None
    return Critic(
        group=backends.critic,
        residency=CriticResidency.of(plan, backends.critic, run.clock),
        clock=run.clock,
        num_warmup_updates=plan.critic_warmup_steps * plan.recipe.training.minibatches_per_step,
    )
