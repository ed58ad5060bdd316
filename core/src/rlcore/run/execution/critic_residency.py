"""The critic's part of a device's memory: it may be elsewhere while it does not work."""

from collections.abc import Iterator
from contextlib import contextmanager

from attrs import define

from rlcore.config.critic import Offload
from rlcore.run.execution.backend_plan import BackendPlan
from rlcore.run.execution.residency import idle_trainer, offload_of_critic
from rlcore.run.report.timing import PhaseClock
from rlcore.spi import capabilities
from rlcore.spi.execution import TrainerGroup
from rlcore.spi.lifecycle import RESIDENT


@define(kw_only=True, eq=False)
class CriticResidency:
    """Moves the critic: onto the device while it works, and else as the recipe says."""

    critic: TrainerGroup
    clock: PhaseClock
    besides_policy: Offload
    """The parts that leave the device while the policy trains."""
    besides_generator: Offload
    """The parts that leave the device while a generator on the same device works."""
    moves: bool
    """True where it is ever moved."""
    _absent: Offload | None = None
    """The parts that are away; None at first, since it may have made room for the generator to start."""

    @classmethod
    def of(cls, plan: BackendPlan, critic: TrainerGroup, clock: PhaseClock) -> "CriticResidency":
        """A plan's; one that never moves where there is no GPU, or the trainer's plugin cannot move what it holds."""
        alone: Offload = "none" if plan.recipe.critic is None else plan.recipe.critic.offload
        together = offload_of_critic(plan) if plan.shares_devices else alone
        can_move = plan.device == "cuda" and critic.has(capabilities.RESIDENCY)
        moves = can_move and (alone, together) != ("none", "none")
        return cls(critic=critic, clock=clock, besides_policy=alone, besides_generator=together, moves=moves)

    @contextmanager
    def working(self) -> Iterator[None]:
        """The critic on the device, until the end of the block. After an error it stays there."""
        self._move("none")
        yield
        self._move(self.besides_policy)

    def make_room(self) -> None:
        """Leave the device to the generator."""
        self._move(self.besides_generator)

    def _move(self, absent: Offload) -> None:
        if not self.moves or self._absent == absent:
            return
        with self.clock.phase("offload"):
            self.critic.set_residency(RESIDENT if absent == "none" else idle_trainer(absent))
        self._absent = absent
