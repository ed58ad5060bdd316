"""`train`: build what a prepared recipe chose, run it, and leave a run directory behind."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from attrs import evolve, frozen

from rlcore.registry.algorithm_handle import AlgorithmState
from rlcore.registry.binding import build_sink
from rlcore.registry.plugin_errors import first_line
from rlcore.run.checkpoint_evaluation import EvaluatedRun, checkpoint_evaluator
from rlcore.run.data.rows_digest import RowDigests
from rlcore.run.data.tokenizer import Tokenizer
from rlcore.run.ending import describe_model, finish, run_to_end
from rlcore.run.execution.backends import OpenBackends, execution
from rlcore.run.execution.engine_limit import EngineLimitError
from rlcore.run.execution.weight_sync import weight_sync_of
from rlcore.run.interrupt import InterruptGuard, ended_by_sigterm
from rlcore.run.loop_of_run import LoopParts, critic_of
from rlcore.run.plan.inputs import Inputs, load_inputs
from rlcore.run.plan.run_plan import RunPlan
from rlcore.run.plan.sections import plugin_config
from rlcore.run.protocols import Backends, LoopObserver, LoopPosition
from rlcore.run.report.progress import Progress
from rlcore.run.report.recorded_progress import RecordedProgress
from rlcore.run.report.sinks import Sinks
from rlcore.run.report.timing import PhaseClock
from rlcore.run.rollout.rollout_trace import RolloutTrace
from rlcore.run.storage.hub_upload import upload
from rlcore.run.storage.resuming import check_rows, find_checkpoint, newest, restore
from rlcore.run.storage.run_directory import RunDirectory
from rlcore.run.storage.saver import RunSaver
from rlcore.run.storage.schedule_file import read_replay
from rlcore.spi import ConfigError, SinkContext, WorkerError


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
        prepared = evolve(prepared, continues=checkpoint is not None).observed(directory.path)
        for note in (*prepared.registry.warnings, *prepared.notes, *inputs.notes, *inputs.left_out):
            progress.note(note)
        if not resume:
            directory.begin(prepared, 0)
        with RecordedProgress(progress, status_file=directory.status_file, timeline_file=directory.timeline_file) as recorded:
            clock, guard = PhaseClock(recorded), InterruptGuard()
            with (
                _open_sinks(prepared, directory.path, recorded) as sinks,
                checkpoint_evaluator(
                    EvaluatedRun(
                        recipe=prepared.recipe,
                        directory=directory,
                        sinks=sinks,
                        progress=recorded,
                        clock=clock,
                        guard=guard,
                    )
                ) as evaluations,
                execution(prepared, inputs.tokenizer, directory.logs, recorded) as opened,
            ):
                run = _Run(
                    prepared=prepared,
                    inputs=inputs,
                    digests=digests,
                    directory=directory,
                    sinks=sinks,
                    observers=evaluations,
                    progress=recorded,
                    start=start,
                    allow_changes=allow_changes,
                    initial_state=initial_state,
                    replayed=replayed,
                    clock=clock,
                    guard=guard,
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


@frozen(kw_only=True, eq=False)
class _Run:
    """What stays the same however often the workers are started anew."""

    prepared: RunPlan
    inputs: Inputs
    digests: RowDigests
    """What LoopState keeps as `data`."""
    directory: RunDirectory
    sinks: Sinks
    observers: Sequence[LoopObserver]
    """Those that outlive restarts of the workers."""
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
    guard: InterruptGuard


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


def _run_once(run: _Run, backends: Backends, resume: bool, checkpoint: Path | None) -> dict[str, object]:
    """Run the loop from a checkpoint, or from the beginning, to its end."""
    prepared, directory, progress = run.prepared, run.directory, run.progress
    saver = RunSaver(plan=prepared, backends=backends, tokenizer=run.inputs.tokenizer, directory=directory, digests=run.digests)
    position, critic = LoopPosition(), critic_of(prepared, backends, run.clock)
    weights = weight_sync_of(prepared, backends, run.clock, progress, run.guard, critic)
    if resume:
        weights.to_training()  # what is loaded has to be somewhere
        position = restore(
            saver, prepared.algorithm, checkpoint, initial_state=run.initial_state, allow_changes=run.allow_changes
        )
        directory.begin(prepared, position.step)
    parts = LoopParts(
        plan=prepared,
        inputs=run.inputs,
        saver=saver,
        sinks=run.sinks,
        observers=run.observers,
        replayed=run.replayed,
        progress=progress,
        clock=run.clock,
        guard=run.guard,
    )
    with parts.loop(backends, weights, critic, position, checkpoint if resume else None) as loop:
        run.clock.totals.setdefault("setup", time.perf_counter() - run.start)
        progress.started(directory.path, position.step, prepared.recipe.run.num_steps)
        run_to_end(loop, directory)
    return finish(loop, saver, time.perf_counter() - run.start)
