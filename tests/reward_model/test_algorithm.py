"""The algorithm's needs, and its figures of held-out pairs."""

import numpy as np
import pytest

from rlcore.spi import GROUP_IDS, AlgorithmContext, RolloutBatch, TokenBatch
from rlcore_reward_model.algorithm import RewardAlgorithm
from rlcore_reward_model.config import RewardConfig

CONTEXT = AlgorithmContext(
    seed=0, samples_per_prompt=1, minibatches_per_step=1, temperature=1.0, generation_logprobs_exact=False
)
PAIRS = RolloutBatch(
    batch=TokenBatch(
        tokens=np.zeros(9, np.int32),
        offsets=np.array([0, 2, 5, 7, 9], np.int64),
        loss_mask=np.array([0, 1, 0, 1, 1, 0, 1, 0, 1], np.bool_),
        sequence_columns={GROUP_IDS: np.array([0, 0, 1, 1], np.int32)},
    ),
    rewards=np.array([1, 0, 1, 0], np.float32),
    valid=np.ones(4, np.bool_),
    finish_reasons=np.zeros(4, np.uint8),
)


def test_pairs_are_trained_on_whole_by_a_model_of_values():
    algorithm = RewardAlgorithm(CONTEXT, RewardConfig(center_rewards_coefficient=0.5))
    needs = algorithm.needs
    assert (needs.source, needs.whole_groups, needs.head) == ("preferences", True, "value")
    training = algorithm.build_batch(PAIRS)
    assert training.batch is PAIRS.batch
    assert training.loss.config == RewardConfig(center_rewards_coefficient=0.5)


def test_held_out_pairs_are_measured_by_the_values_at_their_last_tokens():
    values = np.full(9, 100.0, np.float32)
    values[[1, 4, 6, 8]] = [2.0, 0.5, -1.0, 0.0]
    found = RewardAlgorithm(CONTEXT, RewardConfig()).measure_values(PAIRS, values)
    assert found == {
        "rewards/chosen": pytest.approx(0.5),
        "rewards/rejected": pytest.approx(0.25),
        "rewards/margins": pytest.approx(0.25),
        "rewards/accuracies": 0.5,
    }
