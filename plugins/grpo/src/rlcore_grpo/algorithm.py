"""GRPO on the driver: rewards to a training batch."""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rlcore import spi
from rlcore_grpo.config import GrpoConfig
from rlcore_torchkit.rl.advantages import AdvantageOptions, group_advantages, turn_advantages


class Grpo:
    """Group relative policy optimisation; its variants are options of GrpoConfig."""

    def __init__(self, context: spi.AlgorithmContext, config: GrpoConfig) -> None:
        self.config = config.resolved(context)
        self._loss = _loss_spec(self.config)
        self._options: AdvantageOptions = {
            "baseline": config.advantage_baseline,
            "normalisation": config.advantage_normalisation,
            "epsilon": config.advantage_epsilon,
        }
        self.needs = spi.AlgorithmNeeds(
            source="rollouts",
            previous_logprobs=self.config.previous_logprobs == "trainer",
            reference_logprobs=spi.REFERENCE_LOGPROBS in self._loss.token_columns,
            entropy=self._loss.entropy != "none",
            min_samples_per_prompt=2,
            untruncated_sampling=True,
            corrects_staleness=self.config.corrects_staleness,
        )

    def build_batch(self, rollouts: spi.RolloutBatch) -> spi.TrainingBatch:
        """One advantage an episode, in whatever number of sequences, or one a turn, the same for each of its loss tokens."""
        batch, turns = rollouts.batch, rollouts.turns
        if self.config.advantage_per == "turn" and turns is not None:
            of_turns = self._of_turns(rollouts, turns)
            first = np.repeat(turns.offsets[:-1], batch.lengths)
            per_token = np.where(batch.loss_mask, np.take(of_turns, first + turns.turn_of, mode="clip"), np.float32(0))
            advantages = np.zeros(len(rollouts.rewards), np.float32)
            np.maximum.at(advantages, np.repeat(np.arange(len(advantages)), np.diff(turns.offsets)), np.abs(of_turns))
        else:
            advantages = self._advantages(rollouts)
            per_token = np.repeat(advantages, batch.lengths)
            np.copyto(per_token, np.float32(0), where=~batch.loss_mask)
        return spi.TrainingBatch(
            batch=batch.with_token_column(spi.ADVANTAGES, per_token),
            loss=self._loss,
            metrics=_metrics(rollouts, advantages),
            no_signal=self._no_signal(rollouts, advantages),
            has_signal=None if self._has_other_terms else advantages != 0,
        )

    def _advantages(self, rollouts: spi.RolloutBatch) -> NDArray[np.float32]:
        """float32 [N]: 0.0 where `valid` is False; an episode counts once in its group's statistics."""
        first = rollouts.first_sequences
        valid = rollouts.valid[first]
        advantages = np.zeros(len(first), np.float32)
        advantages[valid] = group_advantages(rollouts.rewards[first][valid], rollouts.group_ids[first][valid], **self._options)
        return advantages[rollouts.episode_of]

    def _of_turns(self, rollouts: spi.RolloutBatch, turns: spi.TurnRewards) -> NDArray[np.float32]:
        """float32 [K]: 0.0 in episodes where `valid` is False. Each episode is one sequence."""
        num_turns = np.diff(turns.offsets)
        valid = np.repeat(rollouts.valid, num_turns)
        advantages = np.zeros(len(turns.rewards), np.float32)
        advantages[valid] = turn_advantages(
            turns.rewards[valid], num_turns[rollouts.valid], rollouts.group_ids[rollouts.valid], **self._options
        )
        return advantages

    def _no_signal(self, rollouts: spi.RolloutBatch, advantages: NDArray[np.float32]) -> str | None:
        if not rollouts.batch.loss_mask.any():
            return "no sample has a token to train on"
        if advantages.any() or self._has_other_terms:
            return None
        num_groups = len(np.unique(rollouts.group_ids[rollouts.valid]))
        return f"the rewards of each of the {num_groups} groups are all equal"

    @property
    def _has_other_terms(self) -> bool:
        """Whether a sample without an advantage has a gradient all the same."""
        return bool(self.config.kl_coefficient or self.config.entropy_coefficient)


def _loss_spec(config: GrpoConfig) -> spi.LossSpec:
    """The loss, and what it reads with these options."""
    entropy: Literal["none", "metric", "loss"] = "metric" if config.entropy_metric == "exact" else "none"
    reference = (spi.REFERENCE_LOGPROBS,) if config.kl_coefficient else ()
    return spi.LossSpec(
        path="rlcore_grpo.loss:grpo_loss",
        config=config,
        token_columns=(spi.ADVANTAGES, spi.GENERATION_LOGPROBS, *reference),
        entropy="loss" if config.entropy_coefficient else entropy,
    )


def _metrics(rollouts: spi.RolloutBatch, advantages: NDArray[np.float32]) -> dict[str, float]:
    """`advantage_max` is the largest magnitude; `zero_advantage_groups` the share of groups without a signal. `advantages` are
    float32 [N], one a sample, or the largest magnitude of its turns'."""
    groups, group_of = np.unique(rollouts.group_ids, return_inverse=True)
    largest = np.zeros(len(groups), np.float32)
    np.maximum.at(largest, group_of, np.abs(advantages))
    return {
        "advantage_max": float(largest.max(initial=0.0)),
        "zero_advantage_groups": float(np.mean(largest == 0)) if len(groups) else 0.0,
    }
