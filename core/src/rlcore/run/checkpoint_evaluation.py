"""Opens the package that evaluates a run's checkpoints: an observer of the loop, for as long as the run goes on."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from rlcore.config.recipe import Recipe
from rlcore.registry.functions import call_function
from rlcore.run.interrupt import InterruptGuard
from rlcore.run.protocols import LoopObserver
from rlcore.run.report.metrics_file import append_metrics
from rlcore.run.report.progress import Progress
from rlcore.run.report.sinks import Sinks
from rlcore.run.report.timing import PhaseClock
from rlcore.run.storage.run_directory import RunDirectory
from rlcore.spi import EvaluatedRun


def evaluated_run(
    recipe: Recipe, directory: RunDirectory, sinks: Sinks, progress: Progress, clock: PhaseClock, guard: InterruptGuard
) -> EvaluatedRun:
    """The run as a checkpoint evaluator sees it."""

    def log(step: int, figures: Mapping[str, float]) -> None:
        append_metrics(directory.metrics_file, step, figures)
        sinks.log_evaluation(step, figures)

    return EvaluatedRun(
        recipe=recipe,
        directory=directory.path,
        log=log,
        note=progress.note,
        waiting=partial(clock.phase, "evaluation"),
        deferred=guard.deferred,
    )


@contextmanager
def checkpoint_evaluator(
    recipe: Recipe, directory: RunDirectory, sinks: Sinks, progress: Progress, clock: PhaseClock, guard: InterruptGuard
) -> Iterator[Sequence[LoopObserver]]:
    """Yield what evaluates the run's checkpoints, closed at the end; nothing where the recipe asks for none. PluginError where
    no evaluator is usable."""
    if recipe.checkpoint_evaluation is None:
        yield []
        return
    for label in sinks.without_evaluations:
        progress.note(f"{label} takes no figures of evaluated checkpoints; they are in metrics.jsonl")
    run = evaluated_run(recipe, directory, sinks, progress, clock, guard)
    evaluator: Any = call_function("checkpoint_evaluator", run)
    try:
        yield [evaluator]
    finally:
        evaluator.close()
