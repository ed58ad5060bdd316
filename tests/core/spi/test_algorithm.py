"""Rollouts check themselves: what an algorithm reads is of the shape, dtype and order that the interface promises."""

import numpy as np
import pytest
from attrs import evolve

from rlcore.spi import ContractError, RolloutBatch, TokenBatch

BATCH = TokenBatch(
    tokens=np.array([1, 2], np.int32),
    offsets=np.array([0, 2]),
    loss_mask=np.array([False, True]),
    sequence_columns={"group_ids": np.zeros(1, np.int32)},
)
TWO = BATCH.select(np.zeros(2, np.int64))
ROLLOUTS = RolloutBatch(
    batch=BATCH,
    rewards=np.zeros(1, np.float32),
    valid=np.ones(1, np.bool_),
    finish_reasons=np.zeros(1, np.uint8),
)
TWO_ROLLOUTS = RolloutBatch(
    batch=TWO,
    rewards=np.zeros(2, np.float32),
    valid=np.ones(2, np.bool_),
    finish_reasons=np.zeros(2, np.uint8),
)


@pytest.mark.parametrize(
    ("record", "changes"),
    [
        (ROLLOUTS, {"rewards": np.zeros(1)}),
        (ROLLOUTS, {"rewards": np.zeros(2, np.float32)}),
        (ROLLOUTS, {"rewards": np.array([np.nan], np.float32)}),
        (TWO_ROLLOUTS, {"batch": evolve(TWO, sequence_columns={"group_ids": np.array([1, 0], np.int32)})}),
        (ROLLOUTS, {"batch": evolve(BATCH, sequence_columns={"group_ids": np.zeros(1, np.int64)})}),
        (ROLLOUTS, {"batch": evolve(BATCH, sequence_columns={})}),
        (ROLLOUTS, {"valid": np.ones(1, np.int32)}),
        (ROLLOUTS, {"finish_reasons": np.zeros(1, np.int32)}),
    ],
)
def test_records_refuse_arrays_of_the_wrong_shape_dtype_or_range(record, changes):
    with pytest.raises(ContractError) as raised:
        evolve(record, **changes)
    (name,) = changes
    name = "group_ids" if name == "batch" else name
    assert name in str(raised.value)


def test_sequences_are_counted_by_episode():
    assert TWO_ROLLOUTS.first_sequences.tolist() == TWO_ROLLOUTS.episode_of.tolist() == [0, 1]
    columns = {"group_ids": np.array([0, 0, 0, 1], np.int32), "episode_ids": np.array([3, 3, 5, 6], np.int32)}
    rollouts = RolloutBatch(
        batch=evolve(BATCH.select(np.zeros(4, np.int64)), sequence_columns=columns),
        rewards=np.zeros(4, np.float32),
        valid=np.ones(4, np.bool_),
        finish_reasons=np.zeros(4, np.uint8),
    )
    assert rollouts.first_sequences.tolist() == [0, 2, 3]
    assert rollouts.episode_of.tolist() == [0, 0, 1, 2]


@pytest.mark.parametrize("column", [np.zeros(2, np.int64), np.array([1, 0], np.int32)])
def test_episodes_are_numbered_in_order(column):
    with pytest.raises(ContractError, match="episode_ids"):
        evolve(TWO_ROLLOUTS, batch=evolve(TWO, sequence_columns={**TWO.sequence_columns, "episode_ids": column}))
