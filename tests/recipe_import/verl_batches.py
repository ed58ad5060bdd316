"""A batch of verl's, and what rlcore computes of it with the options that an imported recipe has."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from rlcore.spi import (
    ADVANTAGES,
    GENERATION_LOGPROBS,
    GROUP_IDS,
    REFERENCE_LOGPROBS,
    WEIGHT_VERSIONS,
    AlgorithmContext,
    LossInputs,
    RolloutBatch,
    TokenBatch,
)
from rlcore_grpo.algorithm import Grpo
from rlcore_grpo.config import GrpoConfig
from rlcore_import.recipe import ImportedRecipe
from rlcore_torchkit.rl.covariance import HIGH_COVARIANCE
from rlcore_torchkit.rl.policy_gradient import policy_gradient_loss

from .peer_verl import Batch

CONFIG: dict[str, Any] = {
    "data": {"train_batch_size": 64, "max_prompt_length": 32, "max_response_length": 40, "train_files": "t.parquet"},
    "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False, "kl_penalty": "kl", "kl_ctrl": {"kl_coef": 0.01}},
    "actor_rollout_ref": {
        "model": {"path": "acme/small"},
        "actor": {"strategy": "fsdp", "ppo_mini_batch_size": 16, "clip_ratio_low": 0.2, "clip_ratio_high": 0.3},
        "rollout": {"name": "vllm", "n": 4},
    },
    "trainer": {"total_training_steps": 100, "nnodes": 1, "n_gpus_per_node": 8},
}
ACTOR, LOSS, CORRECTION = "actor_rollout_ref.actor", "actor_rollout_ref.actor.policy_loss", "algorithm.rollout_correction"
AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
Read = Callable[..., ImportedRecipe]


def random_batch() -> Batch:
    """Six answers of one to nine tokens, with probabilities near each other."""
    random = np.random.default_rng(1)
    mask = np.arange(9) < np.array([9, 4, 1, 6, 7, 2])[:, None]
    rollout = np.where(mask, -random.exponential(1.0, mask.shape), 0.0)

    def near(spread: float) -> Any:
        return np.where(mask, rollout + random.normal(0, spread, mask.shape), 0.0)

    entropy = np.where(mask, random.exponential(1.0, mask.shape), 0.0)
    advantages = np.array([1.5, -0.7, -2.0, 0.4, 1.1, -0.3])
    return Batch(
        policy=near(0.6), old=near(0.2), rollout=rollout, reference=near(0.5), entropy=entropy, advantages=advantages, mask=mask
    )


def config_of(found: ImportedRecipe) -> GrpoConfig:
    """The options of GRPO that an imported recipe has."""
    options = {key.rpartition(".")[2]: value for key, value in found.values.items() if key.startswith("algorithm.grpo.")}
    context = context_of(samples=4, updates=4, max_response_tokens=found.values["rollout.max_response_tokens"])
    return GrpoConfig(**options).resolved(context)


def context_of(*, samples: int, updates: int, max_response_tokens: int) -> AlgorithmContext:
    return AlgorithmContext(
        seed=0,
        samples_per_prompt=samples,
        minibatches_per_step=updates,
        temperature=1.0,
        generation_logprobs_exact=False,
        max_response_tokens=max_response_tokens,
    )


def packed_places(batch: Batch) -> tuple[Any, Any]:
    """The offsets of a batch's sequences, and a mask of their answers; each answer follows a prompt of one token."""
    offsets = np.concatenate([[0], np.cumsum(batch.mask.sum(1) + 1)]).astype(np.int64)
    inside = np.ones(offsets[-1], bool)
    inside[offsets[:-1]] = False
    return offsets, inside


def loss_of(found: ImportedRecipe, batch: Batch, chosen: Any = None) -> float:
    """rlcore's loss of a batch with the options of an imported recipe."""
    offsets, inside = packed_places(batch)

    def packed(values: Any) -> torch.Tensor:
        found = np.zeros(len(inside))
        found[inside] = np.broadcast_to(values, batch.mask.shape)[batch.mask]
        return torch.tensor(found)

    columns = {
        GENERATION_LOGPROBS: packed(batch.rollout),
        REFERENCE_LOGPROBS: packed(batch.reference),
        ADVANTAGES: packed(batch.advantages[:, None]),
        HIGH_COVARIANCE: packed(np.zeros_like(batch.mask) if chosen is None else chosen),
    }
    tokens = TokenBatch(tokens=np.zeros(len(inside), np.int32), offsets=offsets, loss_mask=inside, token_columns={})
    inputs = LossInputs(
        logprobs=packed(batch.policy),
        previous_logprobs=packed(batch.old),
        entropy=packed(batch.entropy),
        loss_mask=torch.tensor(inside),
        offsets=torch.tensor(offsets),
        token_columns=columns,
        sequence_columns={},
        counts=tokens.counts(),
    )
    return float(policy_gradient_loss(inputs, config_of(found)).loss)


def advantages_of(found: ImportedRecipe, rewards: Any, groups: Any, batch: Batch) -> Any:
    """rlcore's advantages of a step's samples, [B, T], with the options of an imported recipe."""
    offsets, inside = packed_places(batch)
    columns = {WEIGHT_VERSIONS: np.where(inside, 0, -1).astype(np.int32)}
    for name, values in ((GENERATION_LOGPROBS, batch.rollout), (REFERENCE_LOGPROBS, batch.reference)):
        columns[name] = np.zeros(len(inside), np.float32)
        columns[name][inside] = values[batch.mask]
    tokens = TokenBatch(
        tokens=np.zeros(len(inside), np.int32),
        offsets=offsets,
        loss_mask=inside,
        token_columns=columns,
        sequence_columns={GROUP_IDS: groups.astype(np.int32)},
    )
    size = len(rewards)
    rollouts = RolloutBatch(
        batch=tokens, rewards=rewards.astype(np.float32), valid=np.ones(size, bool), finish_reasons=np.zeros(size, np.uint8)
    )
    context = context_of(samples=3, updates=1, max_response_tokens=40)
    built = Grpo(context, config_of(found)).build_batch(rollouts).batch.token_columns[ADVANTAGES]
    matrix = np.zeros(batch.mask.shape)
    matrix[batch.mask] = built[inside]
    return matrix


def reported(found: ImportedRecipe) -> set[str]:
    """Keys that the importer lists as changing what is trained."""
    return {one.key for one in found.unmapped if one.changes_meaning}
