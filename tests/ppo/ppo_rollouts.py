"""Samples of a step as PPO gets them, and the algorithm."""

import numpy as np

from rlcore.spi import (
    EPISODE_IDS,
    GENERATION_LOGPROBS,
    GROUP_IDS,
    REFERENCE_LOGPROBS,
    VALUES,
    WEIGHT_VERSIONS,
    AlgorithmContext,
    FinishReason,
    RolloutBatch,
    TokenBatch,
    TurnRewards,
)
from rlcore_ppo.algorithm import Ppo
from rlcore_ppo.config import PpoConfig


def make_ppo(*, exact=False, **options):
    context = AlgorithmContext(
        seed=0, samples_per_prompt=1, minibatches_per_step=1, temperature=1.0, generation_logprobs_exact=exact
    )
    return Ppo(context, PpoConfig(**options))


def make_rollouts(masks, rewards, *, episode_ids=None, valid=None, turns=None, cut=(), stopped=()):
    """Sequences with these masks of generated tokens, one group each, and random columns; `turns` (turn_of, rewards, offsets),
    `cut` the sequences that a limit of tokens ended, `stopped` those that a limit of turns did."""
    random = np.random.default_rng(11)
    mask, offsets = np.concatenate(masks).astype(bool), np.cumsum([0, *map(len, masks)])
    size, number = len(mask), len(masks)
    columns = {
        GENERATION_LOGPROBS: np.where(mask, -random.exponential(1, size), 0).astype(np.float32),
        REFERENCE_LOGPROBS: -random.exponential(1, size).astype(np.float32),
        VALUES: random.normal(0, 1, size).astype(np.float32),
        WEIGHT_VERSIONS: np.where(mask, 0, -1).astype(np.int32),
    }
    of_sequences = {GROUP_IDS: np.arange(number, dtype=np.int32)}
    if episode_ids is not None:
        of_sequences[EPISODE_IDS] = np.array(episode_ids, np.int32)
        of_sequences[GROUP_IDS] = np.array(episode_ids, np.int32)
    reasons = [FinishReason.LENGTH if index in cut else FinishReason.STOP for index in range(number)]
    return RolloutBatch(
        batch=TokenBatch(
            tokens=np.zeros(size, np.int32),
            offsets=offsets.astype(np.int64),
            loss_mask=mask,
            token_columns=columns,
            sequence_columns=of_sequences,
        ),
        rewards=np.array(rewards, np.float32),
        valid=np.ones(number, bool) if valid is None else np.array(valid),
        finish_reasons=np.array(reasons, np.uint8),
        **({"truncated": np.isin(np.arange(number), [*cut, *stopped])} if stopped else {}),
        turns=None
        if turns is None
        else TurnRewards(
            turn_of=np.array(turns[0], np.int32), rewards=np.array(turns[1], np.float32), offsets=np.array(turns[2], np.int64)
        ),
    )
