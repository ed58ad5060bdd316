"""The critic of a run: the values of a step's tokens, its updates, and its part of a device's memory."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from attrs import define, evolve, frozen

from rlcore import spi
from rlcore.config.model import Offload
from rlcore.run.execution.backend_plan import BackendPlan
from rlcore.run.execution.residency import idle_trainer, offload_of_critic
from rlcore.run.protocols import LoopPosition
from rlcore.run.report.timing import PhaseClock
from rlcore.run.train_step.metrics import training_metrics
from rlcore.spi import capabilities
from rlcore.spi.execution import Minibatch, TrainerGroup
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


@frozen(kw_only=True, eq=False)
class Critic:
    """The value model, trained by a second trainer. Its version is the loop position's `critic_version`."""

    group: TrainerGroup
    residency: CriticResidency
    clock: PhaseClock
    num_warmup_updates: int
    """Planned updates that come before the policy's first."""

    def score(self, samples: spi.RolloutBatch, position: LoopPosition) -> spi.RolloutBatch:
        """Add the column `values` of the present critic, also to tokens of older weights."""
        batch = samples.batch
        with self.residency.working(), self.clock.phase("logprobs"):
            values = self.group.values(batch, np.arange(batch.num_sequences), position.critic_version)
        return evolve(samples, batch=batch.with_token_column(spi.VALUES, values))

    def train(
        self,
        step: int,  # noqa: ARG002 - it is trained in each
        minibatches: Sequence[Minibatch],
        training: spi.TrainingBatch,
        position: LoopPosition,
    ) -> dict[str, float]:
        """Make an update on each of the policy's minibatches, whose schedule steps count from the end of the warm-up. Return
        the metrics as `critic/<name>`, and advance `position.critic_version`."""
        if training.critic_loss is None:
            return {}
        results = []
        with self.residency.working():
            for minibatch in minibatches:
                planned = minibatch.schedule_step + self.num_warmup_updates
                with self.clock.phase("train"):
                    result, _ = self.group.train_step(
                        evolve(minibatch, batch=without_policy_choices(minibatch.batch), schedule_step=planned),
                        training.critic_loss,
                        position.critic_version,
                        bounds={},
                        logprobs=False,
                    )
                position.critic_version = result.weight_version
                results.append(result)
        return {f"critic/{name}": value for name, value in training_metrics(results).items()}


def without_policy_choices(batch: spi.TokenBatch) -> spi.TokenBatch:
    """Drop the policy's expert choices and sampling masks, which do not apply to the critic."""
    columns = {name: column for name, column in batch.token_columns.items() if name != spi.ROUTED_EXPERTS}
    return evolve(batch, token_columns=columns, sampling_mask=None)
