"""The updates of a step: whole groups, each sequence once, and none without a signal."""

from collections.abc import Callable

import numpy as np
import pytest
from attrs import evolve

from rlcore.run.plan.run_plan import RunPlan
from rlcore.run.train_step.minibatches import minibatches_of
from rlcore.spi import GROUP_IDS, ContractError, LossSpec, TokenBatch, TrainingBatch

Prepare = Callable[..., RunPlan]
LOSS = LossSpec(path="loss:loss", config=None)
GROUPS = np.array([0, 0, 1, 1, 2, 2, 3, 3])


def training_of(**options: object) -> TrainingBatch:
    """Eight sequences of two tokens, in four groups."""
    batch = TokenBatch(
        tokens=np.zeros(16, np.int32),
        offsets=np.arange(0, 18, 2),
        loss_mask=np.tile([False, True], 8),
        sequence_columns={GROUP_IDS: GROUPS},
    )
    return TrainingBatch(batch=batch, loss=LOSS, metrics={}, **options)  # type: ignore[arg-type]


def test_one_update_has_all_sequences_in_order(prepared: Prepare) -> None:
    (minibatch,) = minibatches_of(training_of(), prepared("training.minibatches_per_step=1").recipe, 3)
    assert minibatch.sequences.tolist() == list(range(8))
    assert (minibatch.schedule_step, minibatch.counts.num_loss_tokens) == (2, 8)


def test_several_divide_the_groups_otherwise_in_each_step(prepared: Prepare) -> None:
    recipe = prepared("training.minibatches_per_step=2").recipe
    drawn = set()
    for step in range(1, 9):
        first, second = minibatches_of(training_of(), recipe, step)
        assert (first.schedule_step, second.schedule_step) == (2 * step - 2, 2 * step - 1)
        assert sorted([*first.sequences, *second.sequences]) == list(range(8))
        groups = [set(GROUPS[one.sequences].tolist()) for one in (first, second)]
        assert groups[0].isdisjoint(groups[1])
        drawn.add(tuple(first.sequences.tolist()))
        again = minibatches_of(training_of(), recipe, step)[0]
        assert again.sequences.tolist() == first.sequences.tolist()
    assert len(drawn) > 2


def test_one_without_a_signal_is_left_out_and_the_others_keep_their_numbers(prepared: Prepare) -> None:
    recipe = prepared("training.minibatches_per_step=4").recipe
    every = minibatches_of(training_of(), recipe, 1)
    left_out = every[1].sequences
    found = minibatches_of(training_of(has_signal=~np.isin(np.arange(8), left_out)), recipe, 1)
    assert [one.schedule_step for one in found] == [0, 2, 3]


def test_groups_have_to_be_known_where_there_are_several(prepared: Prepare) -> None:
    training = training_of()
    without = evolve(training, batch=evolve(training.batch, sequence_columns={}))
    assert len(minibatches_of(without, prepared("training.minibatches_per_step=1").recipe, 1)) == 1
    with pytest.raises(ContractError, match="lacks the sequence column"):
        minibatches_of(without, prepared("training.minibatches_per_step=2").recipe, 1)
