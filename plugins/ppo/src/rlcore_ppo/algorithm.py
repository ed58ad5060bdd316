"""PPO on the driver: rewards and the critic's values to a training batch."""

import numpy as np
from numpy.typing import NDArray

from rlcore import spi
from rlcore_ppo.config import PpoConfig
from rlcore_ppo.loss import RETURNS
from rlcore_torchkit.rl.advantages import whitened
from rlcore_torchkit.rl.endpoint_logprobs import EndpointReference
from rlcore_torchkit.rl.episodes import with_episode_tokens
from rlcore_torchkit.rl.gae import explained_variance, generalized_advantages
from rlcore_torchkit.rl.shaping import LIKELIHOOD_WEIGHTS, kl_estimates, likelihood_weights

Float64Array = NDArray[np.float64]
Int64Array = NDArray[np.int64]


class Ppo:
    """Proximal policy optimisation: a policy, and a critic that tells each token's part in what was earned."""

    def __init__(self, context: spi.AlgorithmContext, config: PpoConfig) -> None:
        self.config = config.resolved(context)
        endpoint = config.reference_endpoint
        section = "algorithm.ppo.reference_endpoint"
        self._endpoint = None if endpoint is None else EndpointReference(section, endpoint, context)
        with_kl = config.kl_coefficient > 0 and endpoint is None
        self.needs = spi.AlgorithmNeeds(
            source="rollouts",
            previous_logprobs=self.config.previous_logprobs == "trainer",
            reference_logprobs=with_kl,
            reference_logprobs_in_rollouts=with_kl,
            entropy=True,
            untruncated_sampling=True,
            corrects_staleness=self.config.corrects_staleness,
            critic=True,
        )
        self._loss = spi.LossSpec(
            path="rlcore_ppo.loss:policy_loss",
            config=self.config,
            token_columns=(
                spi.ADVANTAGES,
                spi.GENERATION_LOGPROBS,
                *((LIKELIHOOD_WEIGHTS,) if config.likelihood_coefficient else ()),
            ),
            entropy="loss" if config.entropy_coefficient else "metric",
        )
        self._critic_loss = spi.LossSpec(
            path="rlcore_ppo.loss:critic_loss", config=self.config, token_columns=(RETURNS, spi.VALUES)
        )

    def build_batch(self, rollouts: spi.RolloutBatch) -> spi.TrainingBatch:
        """Each generated token is a step: its value is that of the state before it, which the critic told after the token in
        front of it, whoever said that one. An episode in several sequences is one chain of steps."""
        batch, config = rollouts.batch, self.config
        if self._endpoint is not None:
            batch = self._endpoint.scored(batch)
        steps = np.flatnonzero(batch.loss_mask)
        num_steps = np.bincount(rollouts.episode_of, batch.loss_lengths, len(rollouts.first_sequences)).astype(np.int64)
        told = batch.token_columns[spi.VALUES].astype(np.float64)
        values, metrics = told[steps - 1], dict[str, float]()
        rewards = _rewards_of_steps(rollouts, steps, num_steps)
        if config.kl_coefficient:
            policy, reference = batch.token_columns[spi.GENERATION_LOGPROBS], batch.token_columns[spi.REFERENCE_LOGPROBS]
            kl = kl_estimates(policy[steps], reference[steps], estimator=config.kl_estimator)
            rewards -= config.kl_coefficient * kl
            metrics["reward_kl"] = _mean(kl)
        advantages = generalized_advantages(
            rewards,
            values,
            num_steps,
            self._last_values(rollouts, told, steps, num_steps),
            gamma=config.gamma,
            gae_lambda=config.gae_lambda,
        )
        returns = advantages + values
        metrics |= {
            "critic/explained_variance": explained_variance(values, returns),
            "critic/value_mean": _mean(values),
            "critic/return_mean": _mean(returns),
            "advantage_max": float(np.abs(advantages).max(initial=0.0)),
        }
        if config.advantage_normalisation == "batch_whitening":
            advantages = whitened(advantages, epsilon=config.advantage_epsilon)
        for name, found in ((spi.ADVANTAGES, advantages), (RETURNS, returns)):
            column = np.zeros(batch.num_tokens, np.float32)
            column[steps] = found
            batch = batch.with_token_column(name, column)
        if config.likelihood_coefficient:
            batch = batch.with_token_column(LIKELIHOOD_WEIGHTS, likelihood_weights(batch, rollouts.rewards))
        return spi.TrainingBatch(
            batch=with_episode_tokens(batch),
            loss=self._loss,
            critic_loss=self._critic_loss,
            metrics=metrics,
            no_signal=None if len(steps) else "no sample has a token to train on",
        )

    def _last_values(
        self, rollouts: spi.RolloutBatch, told: Float64Array, steps: Int64Array, num_steps: Int64Array
    ) -> Float64Array:
        """float64 [E]: what an episode would have earned behind its last step."""
        last_values = np.zeros(len(num_steps))
        if self.config.bootstrap_truncated:
            last_sequences = np.append(rollouts.first_sequences[1:], rollouts.batch.num_sequences) - 1
            cut = rollouts.truncated[last_sequences] & (num_steps > 0)
            last_values[cut] = told[steps[np.cumsum(num_steps)[cut] - 1]]
        return last_values


def _rewards_of_steps(rollouts: spi.RolloutBatch, steps: Int64Array, num_steps: Int64Array) -> Float64Array:
    """float64 [K]: at the last token of each turn what it earned, where turns are told apart, else all at the episode's last
    token. A turn without a token to train on hands its reward to the token before it."""
    rewards, has_steps = np.zeros(len(steps)), num_steps > 0
    ends = np.cumsum(num_steps)
    if rollouts.turns is None:
        rewards[ends[has_steps] - 1] = rollouts.rewards[rollouts.first_sequences][has_steps]
        return rewards
    turns = rollouts.turns
    episode_of_turn = np.repeat(np.arange(len(num_steps)), np.diff(turns.offsets))
    turn_of_step = turns.turn_of[steps] + np.repeat(turns.offsets[:-1], num_steps)
    found = np.searchsorted(turn_of_step, np.arange(len(turns.rewards)), side="right") - 1
    counted = has_steps[episode_of_turn]
    first = (ends - num_steps)[episode_of_turn]
    np.add.at(rewards, np.maximum(found, first)[counted], turns.rewards[counted])
    return rewards


def _mean(values: Float64Array) -> float:
    return float(values.mean()) if len(values) else 0.0
