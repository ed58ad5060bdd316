"""What a trainer is built with."""

import pytest

from rlcore.spi import ModelSpec, OptimizerSpec, RankInfo, ScheduleSpec, TrainerContext


def test_the_contexts_learning_rate() -> None:
    context = TrainerContext(
        model=ModelSpec(path="none"),
        rank_info=RankInfo(),
        seed=0,
        num_train_steps=4,
        needs_reference=False,
        max_sequence_length=8,
        optimizer=OptimizerSpec(learning_rate=3e-4),
        schedule=ScheduleSpec(warmup_steps=2, decay="linear"),
    )
    assert [context.learning_rate(step) for step in range(5)] == pytest.approx([1.5e-4, 3e-4, 3e-4, 1.5e-4, 0.0])
