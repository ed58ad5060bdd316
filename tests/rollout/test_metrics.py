"""Figures of samples: which samples each is of."""

import numpy as np
import pytest
from attrs import evolve

from rlcore.run.protocols import CollectedRollouts
from rlcore.run.train_step.metrics import rollout_metrics, throughput_metrics
from rlcore.spi import FinishReason, RolloutBatch, TokenBatch
from rlcore.spi.arrays import offsets_of
from rlcore_rollout.evaluation import evaluation_metrics

COLLECTED = CollectedRollouts(
    batch=TokenBatch(
        tokens=np.zeros(16, np.int32),
        offsets=offsets_of([4, 4, 4, 4]),
        loss_mask=np.zeros(16, np.bool_),
        sequence_columns={"group_ids": np.zeros(4, np.int32)},
    ),
    rewards=np.asarray([1.0, 0.0, 0.0, 2.0], np.float32),
    valid=np.asarray([True, True, False, True]),
    finish_reasons=np.asarray([FinishReason.STOP, FinishReason.LENGTH, FinishReason.LENGTH, FinishReason.STOP], np.uint8),
    success=np.asarray([True, False, False, True]),
    responses=["", "", "", ""],
    num_generated=np.asarray([1, 2, 3, 2]),
    failed=np.asarray([False, False, True, False]),
    timed_out=np.asarray([False, False, True, False]),
    truncated=np.asarray([False, True, True, False]),
    environment_metrics={"share": 0.25},
    reward_components={"answer": np.asarray([1.0, 0.0, 5.0, 0.5], np.float32)},
)
"""Four samples, the third of which the environment failed on."""
ALL_FAILED = evolve(COLLECTED, valid=np.zeros(4, np.bool_), failed=np.ones(4, np.bool_))


def test_rewards_are_those_of_valid_samples_and_lengths_those_of_all() -> None:
    assert rollout_metrics(COLLECTED) == pytest.approx(
        {
            "reward_mean": 1.0,
            "reward_std": (2 / 3) ** 0.5,
            "reward/answer": 0.5,
            "success_rate": 2 / 3,
            "response_length_mean": 2.0,
            "response_length_max": 3.0,
            "truncated_fraction": 0.5,
            "environment/failed": 1.0,
            "environment/timed_out": 1.0,
            "environment/share": 0.25,
        }
    )


def test_where_all_failed_rewards_are_nought_and_no_nan() -> None:
    metrics = rollout_metrics(ALL_FAILED)
    assert (metrics["reward_mean"], metrics["reward_std"], metrics["success_rate"]) == (0.0, 0.0, 0.0)
    assert metrics["environment/failed"] == 4.0


def test_pass_at_1_counts_what_failed_as_not_solved() -> None:
    assert evaluation_metrics(COLLECTED) == {
        "eval/pass@1": 0.5,
        "eval/reward_mean": 1.0,
        "eval/response_length_mean": 2.0,
        "eval/truncated_fraction": 0.5,
        "eval/failed": 1.0,
    }


def test_tokens_per_second_count_prompts_and_generated_ones_do_not() -> None:
    assert throughput_metrics(COLLECTED, 2.0) == {
        "tokens_per_second": 8.0,
        "generated_tokens_per_second": 4.0,
    }


def test_demonstrations_have_no_generated_tokens() -> None:
    fields = ("batch", "rewards", "valid", "finish_reasons")
    plain = RolloutBatch(**{name: getattr(COLLECTED, name) for name in fields})
    assert throughput_metrics(plain, 4.0) == {"tokens_per_second": 4.0}
