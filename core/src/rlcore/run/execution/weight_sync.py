"""The weights that the generator holds, and whose turn it is on a device that it shares with the trainer."""

from collections.abc import Callable
from functools import partial

from attrs import frozen

from rlcore.run.execution.backend_plan import BackendPlan
from rlcore.run.execution.critic import Critic
from rlcore.run.execution.refit import Refitter
from rlcore.run.execution.residency import Residency
from rlcore.run.interrupt import InterruptGuard
from rlcore.run.protocols import ResultT, WeightSync, nothing
from rlcore.run.report.progress import Progress
from rlcore.run.report.timing import PhaseClock
from rlcore.spi.execution import Backends


def weight_sync_of(
    plan: BackendPlan,
    backends: Backends,
    clock: PhaseClock,
    progress: Progress,
    guard: InterruptGuard,
    critic: Critic | None = None,
) -> WeightSync:
    """The generator of a plan, as the loop moves it."""
    refitter = Refitter.of(plan, backends, clock, progress)
    if refitter is None:
        return WeightSync()
    residency = Residency.of(
        plan,
        backends.trainer,
        refitter.generator,
        clock,
        move_critic=nothing if critic is None else critic.residency.make_room,
        critic_moves=critic is not None and critic.residency.moves,
    )
    return GeneratorSync(refitter=refitter, residency=residency, guard=guard)


@frozen(kw_only=True, eq=False)
class GeneratorSync(WeightSync):
    """A generator beside the trainer. Interrupts are deferred in a refit: half-moved memory cannot be saved."""

    refitter: Refitter
    residency: Residency
    guard: InterruptGuard

    def to_training(self) -> None:
        """See WeightSync."""
        if self.residency.to_training():
            self.forget()

    def make_room_to_save(self) -> None:
        """See WeightSync."""
        if self.residency.trainer_leaves:
            self.to_training()

    def forget(self) -> None:
        """See WeightSync."""
        self.refitter.held = {}

    def refit(self, weight_version: int, *, before_change: Callable[[], None] = nothing) -> None:
        """See WeightSync."""
        if self.refitter.version != weight_version:
            before_change()
        with self.guard.deferred():
            self.residency.to_generation(self.refitter, weight_version)

    def generating(
        self, generate: Callable[[], ResultT], weight_version: int, *, before_change: Callable[[], None] = nothing
    ) -> ResultT:
        """See WeightSync."""
        return self.refitter.generating(generate, partial(self.refit, weight_version, before_change=before_change))

    def take_metrics(self) -> dict[str, float]:
        """See WeightSync."""
        return self.residency.metrics | self.refitter.take_metrics()
