"""The algorithm of the fakes: advantages, signals, needs."""

import numpy as np

from rlcore.spi import (
    ADVANTAGES,
    AlgorithmContext,
    RolloutBatch,
    TokenBatch,
)
from rlcore.testing.fakes.algorithm import FakeAlgorithm, FakeAlgorithmConfig


def rollouts(rewards, group_ids, valid):
    lengths = [2 + index for index in range(len(rewards))]
    batch = TokenBatch(
        tokens=np.ones(sum(lengths), np.int32),
        offsets=np.cumsum([0, *lengths]),
        loss_mask=np.concatenate([np.arange(length) > 0 for length in lengths]),
        sequence_columns={"group_ids": np.array(group_ids, np.int32)},
    )
    return RolloutBatch(
        batch=batch,
        rewards=np.array(rewards, np.float32),
        valid=np.array(valid),
        finish_reasons=np.zeros(len(rewards), np.uint8),
    )


def algorithm(**options):
    context = AlgorithmContext(
        seed=0, samples_per_prompt=2, minibatches_per_step=1, temperature=1.0, generation_logprobs_exact=True
    )
    return FakeAlgorithm(context, FakeAlgorithmConfig(**options))


def test_advantages_are_rewards_against_the_groups_valid_samples():
    training = algorithm().build_batch(rollouts([1.0, 0.0, 5.0, 0.5, 1.5], [0, 0, 0, 1, 1], [True, True, False, True, True]))
    firsts = training.batch.offsets[:-1]
    np.testing.assert_allclose(training.batch.token_columns[ADVANTAGES][firsts + 1], [0.5, -0.5, 0.0, -0.5, 0.5])
    assert not training.batch.token_columns[ADVANTAGES][firsts].any()
    assert training.no_signal is None
    assert set(training.loss.token_columns) == {ADVANTAGES}


def test_equal_rewards_are_no_signal():
    assert "equal" in algorithm().build_batch(rollouts([1.0, 1.0, 0.0, 0.0], [0, 0, 1, 1], [True] * 4)).no_signal


def test_the_algorithm_asks_for_what_its_options_need():
    needs = algorithm(kl_coefficient=0.1, previous_logprobs=True).needs
    assert (needs.reference_logprobs, needs.previous_logprobs, needs.entropy) == (True, True, True)
    needs = algorithm(source="demonstrations").needs
    assert (needs.source, needs.reference_logprobs, needs.entropy, needs.min_samples_per_prompt) == (
        "demonstrations",
        False,
        False,
        1,
    )
    assert algorithm(entropy_coefficient=0.1).loss().entropy == "loss"
