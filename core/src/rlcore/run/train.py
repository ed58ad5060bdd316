"""`train`: build what a prepared recipe chose, run it, and leave a run directory behind."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from attrs import evolve

from rlcore.registry.binding import build_sink
from rlcore.run.execution.context import execution
from rlcore.run.interrupt import InterruptGuard, ended_by_sigterm
from rlcore.run.observers import ObservedRun, installed_observers
from rlcore.run.plan.inputs import load_inputs
from rlcore.run.plan.run_plan import RunPlan
from rlcore.run.plan.sections import plugin_config
from rlcore.run.report.progress import Progress
from rlcore.run.report.recorded_progress import RecordedProgress
from rlcore.run.report.sinks import Sinks
from rlcore.run.report.timing import PhaseClock
from rlcore.run.storage.resuming import check_rows, find_checkpoint
from rlcore.run.storage.run_directory import RunDirectory
from rlcore.run.training.ending import complete
from rlcore.run.training.loop_of_run import TrainingRun
from rlcore.run.training.restarts import run_with_restarts
from rlcore.spi import SinkContext, Tokenizer


def train(
    prepared: RunPlan,
    *,
    resume: bool,
    progress: Progress,
    tokenizer: Tokenizer | None = None,
    allow_changes: bool = False,
) -> dict[str, object]:
    """Run a recipe to its last step and return what summary.json holds.

    `resume` continues the run of the same name from its newest intact checkpoint; without it an existing run is an error.
    `allow_changes` resumes also where the recipe makes another run of it; every change is noted in any case.
    `tokenizer` stands in for the model's own, in tests. Raises InterruptedRun after Ctrl-C, once a checkpoint is saved.
    """
    start = time.perf_counter()
    directory, initial_state = RunDirectory.of(prepared.recipe.run), prepared.algorithm.save_state()
    starting = partial(find_checkpoint, prepared, directory, resume=resume, allow_changes=allow_changes)
    _ = starting(Progress().note)  # before anything is made there
    with (
        ended_by_sigterm(),
        load_inputs(prepared, tokenizer, resume=resume) as inputs,
        directory.locked(),
    ):
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
            clock, guard = PhaseClock(recorded), InterruptGuard()
            with (
                _open_sinks(prepared, directory.path, recorded) as sinks,
                installed_observers(
                    ObservedRun(
                        plan=prepared,
                        tokenizer=inputs.tokenizer,
                        directory=directory,
                        sinks=sinks,
                        progress=recorded,
                        clock=clock,
                        guard=guard,
                    )
                ) as observers,
                execution(prepared, inputs.tokenizer, directory.logs, recorded) as opened,
            ):
                run = TrainingRun(
                    plan=prepared,
                    inputs=inputs,
                    digests=digests,
                    directory=directory,
                    sinks=sinks,
                    observers=observers,
                    progress=recorded,
                    start=start,
                    allow_changes=allow_changes,
                    initial_state=initial_state,
                    clock=clock,
                    guard=guard,
                )
                summary = sinks.summary = run_with_restarts(run, opened, resume, checkpoint)
            complete(observers, summary)
    progress.finished(summary)
    for observer in observers:
        observer.on_complete(summary)
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
