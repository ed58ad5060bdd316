"""Episodes in several segments: losses and advantages are those of episodes, however they are cut."""

import itertools

import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.spi import (
    ADVANTAGES,
    EPISODE_IDS,
    GENERATION_LOGPROBS,
    GROUP_IDS,
    REFERENCE_LOGPROBS,
    WEIGHT_VERSIONS,
    RolloutBatch,
    TokenBatch,
    TurnRewards,
)
from rlcore.spi.execution import Minibatch
from rlcore_grpo.config import GrpoConfig
from rlcore_torchkit.rl.episodes import EPISODE_TOKENS, with_episode_tokens
from rlcore_torchkit.rl.policy_gradient import policy_gradient_loss
from rlcore_torchkit.rl.shaping import LIKELIHOOD_WEIGHTS

from .grpo_rollouts import make_grpo
from .reference_loss import Reference
from .test_loss import CONFIGS, LENGTHS

BY_TOKEN = {
    name: config
    for name, config in CONFIGS.items()
    if config.ratio == "token"
    and config.objective not in ("gmpo", "vespo")
    and config.importance_correction != "sequence"
    and not config.masks_by_geometric_mean
    and config.off_policy_maximum is None
}
"""The losses of which each token's part needs no other token of its sequence."""
BY_TOKEN |= {
    "sequence mean": evolve(BY_TOKEN["plain"], loss_normalisation="sequence"),
    "constant, cispo": evolve(BY_TOKEN["cispo"], loss_normalisation="constant", constant_length=7),
}


def cut(batch, random):
    """The batch with each sequence cut at some of the tokens that the policy did not say, and its episodes' numbers."""
    starts = set(batch.offsets[:-1].tolist())
    places = [
        place for place in range(batch.num_tokens) if place in starts or not (batch.loss_mask[place] or random.random() < 0.4)
    ]
    owner = np.searchsorted(batch.offsets, places, side="right") - 1
    columns = {name: column[owner] for name, column in batch.sequence_columns.items()}
    return evolve(
        batch,
        offsets=np.array([*places, batch.num_tokens], np.int64),
        sequence_columns={**columns, EPISODE_IDS: owner.astype(np.int32)},
    )


def with_columns(inputs, batch):
    return evolve(inputs, sequence_columns={name: torch.tensor(column) for name, column in batch.sequence_columns.items()})


def loss_and_gradient(inputs, config):
    output = policy_gradient_loss(inputs, config)
    output.loss.backward()
    return output.loss.item(), inputs.logprobs.grad.numpy()


@pytest.mark.parametrize("config", BY_TOKEN.values(), ids=BY_TOKEN)
@settings(max_examples=15)
@given(seed=st.integers(0, 10**6))
def test_an_artificial_cut_changes_neither_loss_nor_gradient(make_batch, make_inputs, config, seed):
    batch, logprobs, entropy = make_batch(seed, LENGTHS)
    segments = with_episode_tokens(cut(batch, np.random.default_rng(seed)))
    assert segments.counts() == batch.counts()
    expected = Reference(batch, config, np.float64(logprobs))(np.float64(logprobs), np.float64(entropy))
    _, uncut = loss_and_gradient(make_inputs(batch, logprobs, entropy), config)
    loss, gradient = loss_and_gradient(with_columns(make_inputs(segments, logprobs, entropy), segments), config)
    assert loss == pytest.approx(expected, rel=1e-10, abs=1e-12)
    np.testing.assert_allclose(gradient, uncut, rtol=1e-12, atol=1e-15)


def loss_of_episodes(batch, config, logprobs, entropy):
    """The loss in float64: a segment's ratios and masks are its own, and an episode's tokens share its weight."""
    reference = Reference(batch, config, logprobs)
    episodes = {}
    for episode, (start, end) in zip(
        batch.sequence_columns[EPISODE_IDS].tolist(), itertools.pairwise(batch.offsets), strict=True
    ):
        piece = np.flatnonzero(batch.loss_mask[start:end]) + start
        if len(piece):
            episodes.setdefault(episode, []).append(reference.sequence(logprobs[piece], entropy[piece], piece))
    total = 0.0
    for segments in episodes.values():
        said = np.concatenate(segments)
        total += {
            "token": said.sum() / batch.loss_mask.sum(),
            "sequence": said.mean() / len(episodes),
            "constant": said.sum() / (config.constant_length or 1) / len(episodes),
        }[config.loss_normalisation]
    if config.likelihood_coefficient:
        weighed = np.float64(batch.token_columns[LIKELIHOOD_WEIGHTS]) * logprobs
        total -= config.likelihood_coefficient * weighed[batch.loss_mask].sum() / batch.loss_mask.sum()
    return total


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@settings(max_examples=10)
@given(seed=st.integers(0, 10**6))
def test_each_loss_is_the_formula_of_episodes_in_any_microbatches(make_batch, make_inputs, config, seed):
    random = np.random.default_rng(seed)
    whole, logprobs, entropy = make_batch(seed, LENGTHS)
    batch = with_episode_tokens(cut(whole, random))
    expected = loss_of_episodes(batch, config, np.float64(logprobs), np.float64(entropy))
    loss, order = 0.0, random.permutation(batch.num_sequences)
    for part in map(np.sort, np.array_split(order, 3)):  # the segments of an episode lie in several microbatches
        where = np.concatenate([np.arange(batch.offsets[one], batch.offsets[one + 1]) for one in part])
        chosen = batch.select(part)
        inputs = with_columns(make_inputs(chosen, logprobs[where], entropy[where], batch.counts()), chosen)
        loss += policy_gradient_loss(inputs, config).loss.item()
    assert loss == pytest.approx(expected, rel=1e-10, abs=1e-12)


ADVANTAGE_CONFIGS = {
    "group": GrpoConfig(),
    "leave one out": GrpoConfig(advantage_baseline="leave_one_out", advantage_normalisation="none"),
    "turns": GrpoConfig(advantage_per="turn"),
    "process": GrpoConfig(advantage_per="process"),
    "whitened": GrpoConfig(advantage_baseline="none", advantage_normalisation="batch_whitening"),
    "divergence in the reward": GrpoConfig(kl_coefficient=0.3, kl_placement="reward"),
    "divergence from each token on": GrpoConfig(kl_coefficient=0.3, kl_placement="reward_to_go"),
    "soft limit of lengths": GrpoConfig(length_penalty="soft_overlong", length_penalty_buffer=0.8),
    "lengths in the group": GrpoConfig(length_penalty="group"),
}


def rollouts_in_turns(random):
    """Eight episodes of two groups, each of two turns behind a prompt, with tokens that are read between them."""
    lengths, masks, turns = [], [], []
    for _ in range(8):
        first, second = random.integers(1, 5, 2)
        masks += [[0, 0], [1] * first, [0, 0], [1] * second]
        turns += [[-1, -1], [0] * first, [-1, -1], [1] * second]
        lengths.append(4 + first + second)
    mask = np.concatenate(masks).astype(bool)
    generation = np.where(mask, -random.exponential(1.0, len(mask)), 0.0)
    batch = TokenBatch(
        tokens=np.zeros(len(mask), np.int32),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        loss_mask=mask,
        token_columns={
            GENERATION_LOGPROBS: generation.astype(np.float32),
            REFERENCE_LOGPROBS: np.where(mask, generation + random.normal(0, 0.5, len(mask)), 0.0).astype(np.float32),
            WEIGHT_VERSIONS: np.where(mask, 0, -1).astype(np.int32),
        },
        sequence_columns={GROUP_IDS: np.repeat(np.arange(2, dtype=np.int32), 4)},
    )
    rewards = random.random(16).astype(np.float32)
    return RolloutBatch(
        batch=batch,
        rewards=rewards.reshape(8, 2).sum(1),
        valid=np.ones(8, bool),
        finish_reasons=np.zeros(8, np.uint8),
        turns=TurnRewards(rewards=rewards, offsets=np.arange(0, 17, 2), turn_of=np.concatenate(turns).astype(np.int32)),
    )


def cut_rollouts(rollouts, random):
    batch = cut(rollouts.batch, random)
    owner = batch.sequence_columns[EPISODE_IDS]
    return RolloutBatch(
        batch=batch,
        rewards=rollouts.rewards[owner],
        valid=rollouts.valid[owner],
        finish_reasons=rollouts.finish_reasons[owner],
        turns=rollouts.turns,
    )


@pytest.mark.parametrize("config", ADVANTAGE_CONFIGS.values(), ids=ADVANTAGE_CONFIGS)
@settings(max_examples=15)
@given(seed=st.integers(0, 10**6))
def test_an_artificial_cut_changes_no_advantage(config, seed):
    random = np.random.default_rng(seed)
    whole = rollouts_in_turns(random)
    uncut, segments = (make_grpo(config).build_batch(one) for one in (whole, cut_rollouts(whole, random)))
    np.testing.assert_array_equal(segments.batch.token_columns[ADVANTAGES], uncut.batch.token_columns[ADVANTAGES])
    assert uncut.batch.token_columns[ADVANTAGES].any()
    assert segments.metrics == uncut.metrics
    assert EPISODE_TOKENS not in uncut.batch.sequence_columns


def test_a_minibatch_counts_the_episodes_of_its_segments():
    random = np.random.default_rng(3)
    batch = make_grpo().build_batch(cut_rollouts(rollouts_in_turns(random), random)).batch
    second = np.flatnonzero(batch.sequence_columns[GROUP_IDS] == 1)
    assert len(second) > 4
    minibatch = Minibatch.of(batch, second, batch.loss_lengths, 0)
    assert minibatch.counts.num_loss_sequences == 4
    assert minibatch.counts == batch.select(second).counts()
