"""Builds the installed observers of a run's loop, for as long as the run goes on."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from attrs import frozen

from rlcore.config.recipe import Recipe
from rlcore.run.interrupt import InterruptGuard
from rlcore.run.plan.checks import wanted_observers
from rlcore.run.plan.run_plan import RunPlan
from rlcore.run.protocols import LoopObserver
from rlcore.run.report.progress import Progress
from rlcore.run.report.sinks import Sinks
from rlcore.run.report.timing import PhaseClock
from rlcore.run.storage.run_directory import RunDirectory
from rlcore.spi import PluginError, Tokenizer


@frozen(kw_only=True, eq=False)
class ObservedRun:
    """A run as the observers of its loop are built for it."""

    plan: RunPlan
    tokenizer: Tokenizer
    directory: RunDirectory
    sinks: Sinks
    progress: Progress
    clock: PhaseClock
    guard: InterruptGuard

    @property
    def recipe(self) -> Recipe:
        """The recipe."""
        return self.plan.recipe


@contextmanager
def installed_observers(run: ObservedRun) -> Iterator[Sequence[LoopObserver]]:
    """Yield the observers of a run, closed at the end. PluginError where one cannot be built."""
    observers: list[LoopObserver] = []
    with ExitStack() as stack:
        for entry in wanted_observers(run.recipe):
            observer = entry.call("observer", run)
            if not isinstance(observer, LoopObserver):
                raise PluginError(f"{entry.label} returned a {type(observer).__name__}; expected a LoopObserver")
            stack.callback(observer.on_close)
            observers.append(observer)
        yield observers
