"""Rewards by which episodes are compared: with penalties of lengths, and less the KL divergence."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from rlcore import spi
from rlcore_grpo.config import GrpoConfig
from rlcore_torchkit.rl.shaping import group_length_reward, kl_estimates, linear_length_penalty, soft_overlong_penalty

Float64Array = NDArray[np.float64]


def length_penalties(rollouts: spi.RolloutBatch, config: GrpoConfig, max_response_tokens: int) -> Float64Array:
    """float64 [V]: of each valid episode, weighed, by the tokens that the policy said in all of its sequences. Of an agent's
    episode, whose answers `max_response_tokens` bounds each, "soft_overlong" and "linear" take the longest answer."""
    first = rollouts.first_sequences
    valid = rollouts.valid[first]
    lengths = np.add.reduceat(rollouts.batch.loss_lengths, first)[valid] if len(first) else np.zeros(0, np.int64)
    is_of_agents = spi.EPISODE_IDS in rollouts.batch.sequence_columns and rollouts.turns is None
    bounded = longest_answers(rollouts)[valid] if is_of_agents else lengths
    match config.length_penalty:
        case "soft_overlong":
            buffer = config.length_penalty_buffer * max_response_tokens
            penalties = soft_overlong_penalty(bounded, max_length=max_response_tokens, buffer=buffer)
        case "linear":
            penalties = linear_length_penalty(bounded, max_length=max_response_tokens)
        case "group":
            penalties = group_length_reward(lengths, rollouts.rewards[first][valid], rollouts.group_ids[first][valid])
        case "none":
            penalties = np.zeros(len(lengths))
    return config.length_penalty_weight * penalties


def longest_answers(rollouts: spi.RolloutBatch) -> NDArray[np.int64]:
    """int64 [E]: the most tokens that the policy said in a row within each episode; something is read before each answer."""
    batch, episode_of = rollouts.batch, rollouts.episode_of
    inside = np.ones(len(batch.loss_mask), np.bool_)
    inside[batch.offsets[:-1]] = False
    begins = np.flatnonzero(batch.loss_mask & ~(inside & np.roll(batch.loss_mask, 1)))
    ends = np.flatnonzero(batch.loss_mask & ~np.roll(inside & batch.loss_mask, -1)) + 1
    longest = np.zeros(len(rollouts.first_sequences), np.int64)
    np.maximum.at(longest, episode_of[np.searchsorted(batch.offsets, begins, side="right") - 1], ends - begins)
    return longest


def kl_of_tokens(batch: spi.TokenBatch, config: GrpoConfig) -> Float64Array:
    """float64 [T]: the KL estimate of each loss token between the policy that said it and the reference; 0.0 elsewhere."""
    policy, reference = batch.token_columns[spi.GENERATION_LOGPROBS], batch.token_columns[spi.REFERENCE_LOGPROBS]
    return np.where(batch.loss_mask, kl_estimates(policy, reference, estimator=config.kl_estimator), 0.0)


def weighed_components(
    rollouts: spi.RolloutBatch, weights: Mapping[str, float]
) -> tuple[list[NDArray[np.float32]], list[float]]:
    """The reward components of valid episodes, M arrays of float32 [V], and the M weights. RewardError where the environment
    names none, or not those that are weighed."""
    first = rollouts.first_sequences
    valid = rollouts.valid[first]
    found = rollouts.reward_components
    unknown = [name for name in weights if name not in found]
    if valid.any() and (unknown or not found):
        names = f"the reward components {', '.join(found)}" if found else "no reward components"
        expected = f"those of reward_weights: {', '.join(weights)}" if unknown else "some, which are normalised one by one"
        raise spi.RewardError(
            f"found {names}; expected {expected}. Let the environment name them in StepResult.reward_components, or set "
            'reward_aggregation = "sum"'
        )
    return [column[first][valid] for column in found.values()], [weights.get(name, 1.0) for name in found]


def require_not_negative(rewards: NDArray[np.floating]) -> None:
    """RewardError for rewards that a division by their mean makes no sense of."""
    if len(rewards) and rewards.min() < 0:
        raise spi.RewardError(
            f'found the reward {rewards.min():g}; expected rewards of at least 0, with advantage_normalisation = "mean". '
            "Let the environment return such rewards, or take another normalisation"
        )
