"""GRPO on the driver: rewards to a training batch."""

import numpy as np
from attrs import evolve
from numpy.typing import NDArray

from rlcore import spi
from rlcore_grpo.config import GrpoConfig
from rlcore_grpo.shaped_rewards import kl_of_tokens, length_penalties, require_not_negative, weighed_components
from rlcore_torchkit.rl.advantages import (
    AdvantageOptions,
    are_equal,
    decoupled_advantages,
    group_advantages,
    process_advantages,
    turn_advantages,
    whitened,
)
from rlcore_torchkit.rl.covariance import HIGH_COVARIANCE, high_covariance
from rlcore_torchkit.rl.endpoint_logprobs import EndpointReference
from rlcore_torchkit.rl.episodes import with_episode_tokens
from rlcore_torchkit.rl.loss_spec import policy_gradient_spec
from rlcore_torchkit.rl.shaping import LIKELIHOOD_WEIGHTS, likelihood_weights, sums_to_go


class Grpo:
    """Group relative policy optimisation; its variants are options of GrpoConfig."""

    def __init__(self, context: spi.AlgorithmContext, config: GrpoConfig) -> None:
        self.config = config.resolved(context)
        self._seed = context.seed
        self._max_response_tokens = context.max_response_tokens
        in_rewards = bool(config.kl_coefficient) and config.kl_placement != "loss"
        self._loss_config = evolve(self.config, kl_coefficient=0.0) if in_rewards else self.config
        self._loss = policy_gradient_spec(self._loss_config)
        self._options: AdvantageOptions = {
            "baseline": config.advantage_baseline,
            "normalisation": config.advantage_normalisation,
            "epsilon": config.advantage_epsilon,
        }
        self._kl_in_rewards = in_rewards
        compares = in_rewards or spi.REFERENCE_LOGPROBS in self._loss.token_columns
        endpoint = config.reference_endpoint
        section = f"{config.section}.reference_endpoint"
        self._endpoint = None if endpoint is None else EndpointReference(section, endpoint, context)
        self.needs = spi.AlgorithmNeeds(
            source="rollouts",
            previous_logprobs=self.config.previous_logprobs == "trainer",
            reference_logprobs=compares and endpoint is None,
            reference_logprobs_in_rollouts=in_rewards and endpoint is None,
            entropy=self._loss.entropy != "none",
            min_samples_per_prompt=2 if config.compares_groups else 1,
            untruncated_sampling=True,
            corrects_staleness=self.config.corrects_staleness,
            compares=self.config.compares,
            dynamic_sampling=config.dynamic_sampling,
        )

    def build_batch(self, rollouts: spi.RolloutBatch) -> spi.TrainingBatch:
        """One advantage an episode, in whatever number of sequences, or one a turn, the same for each of its loss tokens; one a
        token where the KL divergence from there on is taken off."""
        batch, turns = rollouts.batch, rollouts.turns
        if self._endpoint is not None:
            batch = self._endpoint.scored(batch)
        kl = kl_of_tokens(batch, self.config) if self._kl_in_rewards else None
        metrics = {} if kl is None else {"reward_kl": float(kl.sum() / max(batch.loss_mask.sum(), 1))}
        if self.config.advantage_per != "episode" and turns is not None:
            of_turns = self._of_turns(rollouts, turns)
            first = np.repeat(turns.offsets[:-1][rollouts.episode_of], batch.lengths)
            per_token = np.where(batch.loss_mask, np.take(of_turns, first + turns.turn_of, mode="clip"), np.float32(0))
            largest, num_turns = np.zeros(len(turns.offsets) - 1, np.float32), np.diff(turns.offsets)
            np.maximum.at(largest, np.repeat(np.arange(len(largest)), num_turns), np.abs(of_turns))
            advantages = largest[rollouts.episode_of]
        else:
            of_episodes = self._of_episodes(rollouts, kl, metrics)
            advantages = of_episodes.astype(np.float32)[rollouts.episode_of]
            per_token = np.repeat(advantages, batch.lengths)
            np.copyto(per_token, np.float32(0), where=~batch.loss_mask)
        if self._is_per_token:
            per_token = self._of_tokens(per_token, rollouts, kl)
            advantages = np.maximum.reduceat(np.abs(per_token), batch.offsets[:-1]) if batch.num_sequences else advantages
        batch = batch.with_token_column(spi.ADVANTAGES, per_token)
        if self.config.chooses_by_covariance:
            chosen = high_covariance(self.config, batch, seed=self._seed, weight_version=rollouts.weight_version)
            batch = batch.with_token_column(HIGH_COVARIANCE, chosen)
        if self.config.likelihood_coefficient:
            batch = batch.with_token_column(LIKELIHOOD_WEIGHTS, likelihood_weights(batch, rollouts.rewards))
        return spi.TrainingBatch(
            batch=with_episode_tokens(batch),
            loss=self._loss,
            metrics=_metrics(rollouts, advantages) | metrics,
            no_signal=self._no_signal(rollouts, advantages),
            has_signal=None if self._has_other_terms or self.config.objective == "kl_cov" else advantages != 0,
        )

    def _of_episodes(
        self, rollouts: spi.RolloutBatch, kl: NDArray[np.float64] | None, metrics: dict[str, float]
    ) -> NDArray[np.float64]:
        """float64 [E]: 0.0 where `valid` is False; an episode counts once in its group's statistics. Adds to `metrics`."""
        config, first = self.config, rollouts.first_sequences
        valid = rollouts.valid[first]
        groups = rollouts.group_ids[first][valid]
        rewards: NDArray[np.floating] = rollouts.rewards[first][valid]
        penalties = None
        if config.length_penalty != "none":
            penalties = length_penalties(rollouts, config, self._max_response_tokens)
            metrics["length_penalty"] = float(penalties.mean()) if len(penalties) else 0.0
        advantages = np.zeros(len(first))
        if config.reward_aggregation == "normalise_then_sum":
            components, weights = weighed_components(rollouts, config.reward_weights)
            of_length = [] if penalties is None else [penalties]
            advantages[valid] = decoupled_advantages(
                [*components, *of_length], [*weights, *(1.0 for _ in of_length)], groups, **self._options
            )
            return advantages
        if penalties is not None:
            rewards = rewards + penalties
        if kl is not None and config.kl_placement == "reward":
            of_sequences = np.add.reduceat(kl, rollouts.batch.offsets[:-1]) if len(kl) else kl
            rewards = rewards - config.kl_coefficient * np.bincount(rollouts.episode_of, of_sequences)[valid]
        if config.advantage_normalisation == "mean":
            require_not_negative(rewards)
        found = group_advantages(rewards, groups, **self._options)
        if config.advantage_normalisation == "sample_whitening":
            white = whitened(found, epsilon=config.advantage_epsilon)
            # A group without a signal stays so: the mean of all is a rounding where each group's is 0.
            found = np.where((found == 0) & config.compares_groups, 0.0, white)
        advantages[valid] = found
        return advantages

    def _of_turns(self, rollouts: spi.RolloutBatch, turns: spi.TurnRewards) -> NDArray[np.float32]:
        """float32 [K]: 0.0 in episodes where `valid` is False."""
        first, num_turns = rollouts.first_sequences, np.diff(turns.offsets)
        is_valid = rollouts.valid[first]
        valid = np.repeat(is_valid, num_turns)
        if self.config.advantage_normalisation == "mean":
            require_not_negative(turns.rewards[valid])
        advantages = np.zeros(len(turns.rewards), np.float32)
        compared = process_advantages if self.config.advantage_per == "process" else turn_advantages
        advantages[valid] = compared(
            turns.rewards[valid], num_turns[is_valid], rollouts.group_ids[first][is_valid], **self._options
        )
        return advantages

    def _of_tokens(
        self, advantages: NDArray[np.float32], rollouts: spi.RolloutBatch, kl: NDArray[np.float64] | None
    ) -> NDArray[np.float32]:
        """float32 [T]: less the KL divergence from each token of an episode on, and whitened over the loss tokens; 0.0
        elsewhere.

        Where all rewards of the step are equal, whitening has nothing to scale but the divergence, or in the first step its
        roundings: then all are 0.
        """
        batch = rollouts.batch
        values, per_token = advantages[batch.loss_mask].astype(np.float64), np.zeros(batch.num_tokens, np.float32)
        is_white = self.config.advantage_normalisation == "batch_whitening"
        if is_white and are_equal(values):
            return per_token
        if kl is not None and self.config.kl_placement == "reward_to_go":
            of_episodes = np.append(batch.offsets[:-1][rollouts.first_sequences], batch.num_tokens)
            values -= self.config.kl_coefficient * sums_to_go(kl, of_episodes)[batch.loss_mask]
        per_token[batch.loss_mask] = whitened(values, epsilon=self.config.advantage_epsilon) if is_white else values
        return per_token

    @property
    def _is_per_token(self) -> bool:
        """Return whether tokens of an episode may have different advantages."""
        to_go = self._kl_in_rewards and self.config.kl_placement == "reward_to_go"
        return to_go or self.config.advantage_normalisation == "batch_whitening"

    def _no_signal(self, rollouts: spi.RolloutBatch, advantages: NDArray[np.float32]) -> str | None:
        if not rollouts.batch.loss_mask.any():
            return "no sample has a token to train on"
        if advantages.any() or self._has_other_terms:
            return None
        if self._is_per_token or not self.config.compares_groups:
            return "the advantages of all samples are 0"
        num_groups = len(np.unique(rollouts.group_ids[rollouts.valid]))
        return f"the rewards of each of the {num_groups} groups are all equal"

    @property
    def _has_other_terms(self) -> bool:
        """Return whether a sample without an advantage has a gradient all the same."""
        config = self._loss_config
        return bool(config.kl_coefficient or config.entropy_coefficient or config.likelihood_coefficient)


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
