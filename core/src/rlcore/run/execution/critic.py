"""The critic of a run: what it tells of a step's tokens, and its updates."""

from collections.abc import Sequence

import numpy as np
from attrs import evolve, frozen

from rlcore import spi
from rlcore.run.execution.critic_residency import CriticResidency
from rlcore.run.protocols import LoopPosition
from rlcore.run.report.timing import PhaseClock
from rlcore.run.train_step.metrics import training_metrics
from rlcore.spi.execution import Minibatch, TrainerGroup


@frozen(kw_only=True, eq=False)
class Critic:
    """A second trainer, whose model tells values in place of tokens. Its version is the loop position's `critic_version`."""

    group: TrainerGroup
    residency: CriticResidency
    clock: PhaseClock
    num_warmup_updates: int
    """Planned updates that come before the policy's first."""

    def score(self, samples: spi.RolloutBatch, position: LoopPosition) -> spi.RolloutBatch:
        """The samples with the column `values`, told by the present critic, of whatever age the tokens are."""
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
        """An update on each of the policy's minibatches, whose places in the schedule count from the end of the warm-up.
        Return the figures, as `critic/<name>`, and move `position.critic_version` on."""
        if training.critic_loss is None:
            return {}
        results = []
        with self.residency.working():
            for minibatch in minibatches:
                planned = minibatch.schedule_step + self.num_warmup_updates
                with self.clock.phase("train"):
                    result, _ = self.group.train_step(
                        evolve(minibatch, batch=without_choices(minibatch.batch), schedule_step=planned),
                        training.critic_loss,
                        position.critic_version,
                        bounds={},
                        logprobs=False,
                    )
                position.critic_version = result.weight_version
                results.append(result)
        return {f"critic/{name}": value for name, value in training_metrics(results).items()}


def without_choices(batch: spi.TokenBatch) -> spi.TokenBatch:
    """Without what the policy's generator chose among, experts and tokens, which says nothing of the critic."""
    columns = {name: column for name, column in batch.token_columns.items() if name != spi.ROUTED_EXPERTS}
    return evolve(batch, token_columns=columns, sampling_mask=None)
