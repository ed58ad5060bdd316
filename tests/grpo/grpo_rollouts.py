"""Samples of a step as the algorithm gets them, and the algorithm."""

import numpy as np

from rlcore.spi import (
    ADVANTAGES,
    GENERATION_LOGPROBS,
    GROUP_IDS,
    REFERENCE_LOGPROBS,
    WEIGHT_VERSIONS,
    AlgorithmContext,
    RolloutBatch,
    TokenBatch,
)
from rlcore_grpo.algorithm import Grpo
from rlcore_grpo.config import GrpoConfig


def make_grpo(config=None, *, minibatches_per_step=1, exact=False):
    context = AlgorithmContext(
        seed=0,
        samples_per_prompt=4,
        minibatches_per_step=minibatches_per_step,
        temperature=1.0,
        generation_logprobs_exact=exact,
        max_response_tokens=10,
    )
    return Grpo(context, config or GrpoConfig())


def make_rollouts(rewards, group_ids, valid=None, prompt=2, response=3):
    """Samples of `prompt` tokens that were read and `response` that were generated."""
    size = len(rewards)
    valid = np.ones(size, bool) if valid is None else np.array(valid)
    length = prompt + response
    mask = np.tile(np.arange(length) >= prompt, size) & np.repeat(valid, length)
    columns = {
        GENERATION_LOGPROBS: np.where(mask, -1, 0).astype(np.float32),
        WEIGHT_VERSIONS: np.where(mask, 0, -1).astype(np.int32),
    }
    batch = TokenBatch(
        tokens=np.zeros(size * length, np.int32),
        offsets=np.arange(0, size * length + 1, length, dtype=np.int64),
        loss_mask=mask,
        token_columns=columns,
        sequence_columns={"anything": np.arange(size), GROUP_IDS: np.array(group_ids, np.int32)},
    )
    return RolloutBatch(
        batch=batch,
        rewards=np.array(rewards, np.float32),
        valid=valid,
        finish_reasons=np.zeros(size, np.uint8),
    )


def of_lengths(rewards, group_ids, responses, seed=0):
    """Samples with responses of some lengths, and random log-probabilities of the generator's and the reference policy's."""
    random = np.random.default_rng(seed)
    lengths = np.array(responses) + 1
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    mask = np.ones(offsets[-1], bool)
    mask[offsets[:-1]] = False
    generation = np.where(mask, -random.exponential(1.0, len(mask)), 0.0)
    reference = np.where(mask, generation + random.normal(0, 0.5, len(mask)), 0.0)
    columns = {
        GENERATION_LOGPROBS: generation.astype(np.float32),
        REFERENCE_LOGPROBS: reference.astype(np.float32),
        WEIGHT_VERSIONS: np.where(mask, 0, -1).astype(np.int32),
    }
    batch = TokenBatch(
        tokens=np.zeros(len(mask), np.int32),
        offsets=offsets,
        loss_mask=mask,
        token_columns=columns,
        sequence_columns={GROUP_IDS: np.array(group_ids, np.int32)},
    )
    size = len(rewards)
    return RolloutBatch(
        batch=batch,
        rewards=np.array(rewards, np.float32),
        valid=np.ones(size, bool),
        finish_reasons=np.zeros(size, np.uint8),
    )


def advantages_of(config, rollouts):
    """float32 [T]: what the algorithm makes of the rollouts."""
    return make_grpo(config).build_batch(rollouts).batch.token_columns[ADVANTAGES]
