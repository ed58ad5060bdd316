"""Samples, demonstrations and preferences to check algorithms with. Every token has its own number, its place among all."""

from typing import Any

import numpy as np
from attrs import evolve

from rlcore.spi import (
    GENERATION_LOGPROBS,
    GROUP_IDS,
    PREVIOUS_LOGPROBS,
    REFERENCE_LOGPROBS,
    VALUES,
    WEIGHT_VERSIONS,
    AlgorithmNeeds,
    FinishReason,
    RolloutBatch,
    TokenBatch,
)
from rlcore.spi.arrays import BoolArray, Float32Array, Int64Array, offsets_of

SAMPLES_PER_PROMPT = 4
NUM_GROUPS = 3
MAX_TOKENS = 128
"""Numbers of tokens are below it."""
REWARDS = ((0.0, 1.0, 0.25, 0.75), (1.0, 0.0, 0.0, 0.0), (0.5, 0.25, 1.0, 0.0))
"""The rewards of each group's samples; no two groups are equal."""


def make_rollouts(needs: AlgorithmNeeds, seed: int = 0) -> RolloutBatch:
    """A step's data of the kind that an algorithm learns from, with the columns that it needs before `build_batch`."""
    group_ids, rewards = _groups(needs)
    random = np.random.default_rng(seed)
    num_sequences = len(group_ids)
    lengths = random.integers(4, 9, num_sequences)
    batch = TokenBatch(
        tokens=np.arange(lengths.sum(), dtype=np.int32),
        offsets=offsets_of(lengths),
        loss_mask=_after_prompts(lengths, 2),
        token_columns=_columns(needs, random, _after_prompts(lengths, 2)),
        sequence_columns={GROUP_IDS: group_ids.astype(np.int32)},
    )
    rollouts = RolloutBatch(
        batch=batch,
        rewards=rewards,
        valid=np.ones(num_sequences, np.bool_),
        finish_reasons=np.full(num_sequences, FinishReason.STOP, np.uint8),
    )
    return with_rewards(rollouts, rewards) if needs.source == "rollouts" else rollouts


def log_probabilities(num_tokens: int, seed: int) -> Float32Array:
    """float32 [T]: below zero, as those of a model that is rarely certain."""
    return (-0.1 - np.random.default_rng(seed).exponential(1.0, num_tokens)).astype(np.float32)


def with_rewards(rollouts: RolloutBatch, rewards: Float32Array) -> RolloutBatch:
    """The samples with other rewards float32 [N], each of which is made of two parts."""
    quarter = (rewards / 4).astype(np.float32)
    return evolve(rollouts, rewards=rewards, reward_components={"task": rewards - quarter, "form": quarter})


def without(rollouts: RolloutBatch, failed: BoolArray) -> RolloutBatch:
    """The samples, of which those where `failed` bool [N] have no reward: their environment failed."""
    batch = rollouts.batch
    mask = batch.loss_mask & ~np.repeat(failed, batch.lengths)
    columns = {**batch.token_columns}
    if GENERATION_LOGPROBS in columns:
        columns[GENERATION_LOGPROBS] = np.where(mask, columns[GENERATION_LOGPROBS], np.float32(0))
    masked = evolve(rollouts, batch=evolve(batch, loss_mask=mask, token_columns=columns), valid=~failed)
    return with_rewards(masked, np.where(failed, np.float32(0), rollouts.rewards))


def taken(rollouts: RolloutBatch, sequences: Int64Array) -> RolloutBatch:
    """The sequences [M], in this order; their groups are numbered anew, from 0 on."""
    batch = rollouts.batch.select(sequences)
    groups = batch.sequence_columns[GROUP_IDS]
    numbers = np.cumsum(np.diff(groups, prepend=groups[:1]) != 0).astype(np.int32)
    columns = {**batch.sequence_columns, GROUP_IDS: numbers}
    return RolloutBatch(
        batch=evolve(batch, sequence_columns=columns),
        rewards=rollouts.rewards[sequences],
        valid=rollouts.valid[sequences],
        finish_reasons=rollouts.finish_reasons[sequences],
        reward_components={name: column[sequences] for name, column in rollouts.reward_components.items()},
    )


def _groups(needs: AlgorithmNeeds) -> tuple[Int64Array, Float32Array]:
    if needs.source == "preferences":
        return np.repeat(np.arange(NUM_GROUPS), 2), np.tile(np.asarray([1.0, 0.0], np.float32), NUM_GROUPS)
    if needs.source == "labelled":
        return np.repeat(np.arange(NUM_GROUPS), 2), np.repeat(np.arange(NUM_GROUPS) % 2, 2).astype(np.float32)
    if needs.source == "demonstrations":
        return np.arange(2 * NUM_GROUPS), np.zeros(2 * NUM_GROUPS, np.float32)
    return np.repeat(np.arange(NUM_GROUPS), SAMPLES_PER_PROMPT), np.asarray(REWARDS, np.float32).ravel()


def _after_prompts(lengths: Int64Array, num_prompt_tokens: int) -> BoolArray:
    places = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return places >= num_prompt_tokens


def _columns(needs: AlgorithmNeeds, random: np.random.Generator, mask: BoolArray) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    if needs.source == "rollouts":
        columns[GENERATION_LOGPROBS] = np.where(mask, log_probabilities(len(mask), 11), np.float32(0))
        columns[WEIGHT_VERSIONS] = np.where(mask, 0, -1).astype(np.int32)
    if needs.critic:
        columns[VALUES] = (0.3 * random.standard_normal(len(mask))).astype(np.float32)
    if needs.reference_logprobs_in_rollouts:
        columns[REFERENCE_LOGPROBS] = np.where(mask, log_probabilities(len(mask), 12), np.float32(0))
    if needs.policy_logprobs_in_rollouts:
        columns[PREVIOUS_LOGPROBS] = np.where(mask, log_probabilities(len(mask), 13), np.float32(0))
    return columns
