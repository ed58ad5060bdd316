"""Opens the package that evaluates a run's checkpoints: an observer of the loop, for as long as the run goes on."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from attrs import frozen

from rlcore.config.recipe import Recipe
from rlcore.registry.functions import call_function
from rlcore.run.interrupt import InterruptGuard
from rlcore.run.protocols import LoopObserver
from rlcore.run.report.progress import Progress
from rlcore.run.report.sinks import Sinks
from rlcore.run.report.timing import PhaseClock
from rlcore.run.storage.run_directory import RunDirectory


@frozen(kw_only=True, eq=False)
class EvaluatedRun:
    """The arguments of a checkpoint evaluator."""

    recipe: Recipe
    directory: RunDirectory
    sinks: Sinks
    progress: Progress
    clock: PhaseClock
    guard: InterruptGuard


@contextmanager
def checkpoint_evaluator(run: EvaluatedRun) -> Iterator[Sequence[LoopObserver]]:
    """Yield what evaluates the run's checkpoints, closed at the end; nothing where the recipe asks for none. PluginError where
    no evaluator is usable."""
    if run.recipe.checkpoint_evaluation is None:
        yield []
        return
    for label in run.sinks.without_evaluations:
        run.progress.note(f"{label} takes no figures of evaluated checkpoints; they are in metrics.jsonl")
    evaluator: Any = call_function("checkpoint_evaluator", run)
    try:
        yield [evaluator]
    finally:
        evaluator.close()
