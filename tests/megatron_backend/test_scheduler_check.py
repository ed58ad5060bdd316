"""What of Megatron's own schedule the run's length and the peak rule out."""

from typing import Any

import pytest
from attrs import evolve

from rlcore.spi import CheckContext, ModelSpec, OptimizerSpec, ScheduleSpec
from rlcore_megatron.checks.scheduler_check import course_notes, course_problems
from rlcore_megatron.setup.config import MegatronConfig

CONTEXT = CheckContext(
    model=ModelSpec(path="nowhere"),
    device="cpu",
    world_size=1,
    max_sequence_length=64,
    optimizer=OptimizerSpec(learning_rate=0.01),
    schedule=ScheduleSpec(),
    num_train_steps=10,
)
WARMS_UP = evolve(CONTEXT, schedule=ScheduleSpec(warmup_steps=10))


def texts(context: CheckContext, scheduler: dict[str, Any]) -> list[str]:
    config = MegatronConfig(scheduler=scheduler)
    return list(map(str, [*course_problems(context, config)] or course_notes(context, config)))


@pytest.mark.parametrize(
    ("context", "scheduler", "expected"),
    [
        (
            CONTEXT,
            {"lr_warmup_steps": 10},
            "trainer.megatron.scheduler.lr_warmup_steps: found 10; expected less than the run's optimizer steps, where its "
            "decay ends = 10. Or set lr_decay_steps to more",
        ),
        (
            WARMS_UP,
            {"lr_decay_style": "linear"},
            "trainer.megatron.scheduler: found 10 steps until the peak; expected less than the run's optimizer steps, where "
            "its decay ends = 10. Or set lr_decay_steps to more",
        ),
        (
            WARMS_UP,
            {"lr_decay_steps": 9},
            "trainer.megatron.scheduler: found 10 steps until the peak; expected less than lr_decay_steps = 9. Or set "
            "lr_decay_steps to more",
        ),
        (
            CONTEXT,
            {"lr_warmup_steps": 4, "lr_decay_style": "WSD", "wsd_decay_steps": 7, "lr_wsd_decay_style": "linear"},
            "trainer.megatron.scheduler.wsd_decay_steps: found 7; expected at most 6: it ends in step 10, and the warm-up in 4",
        ),
        (
            CONTEXT,
            {"min_lr": 0.02},
            "trainer.megatron.scheduler.min_lr: found 0.02; expected at most optimizer.learning_rate = 0.01",
        ),
        (
            CONTEXT,
            {"init_lr": 0.02},
            "trainer.megatron.scheduler.init_lr: found 0.02; expected at most optimizer.learning_rate = 0.01",
        ),
        (
            CONTEXT,
            {"lr_warmup_steps": 18, "lr_decay_steps": 40},
            "trainer.megatron.scheduler.lr_warmup_steps: 18, while the run makes 10 optimizer steps: 0.005 is all that it "
            "reaches",
        ),
    ],
)
def test_values_that_the_run_has_no_room_for(context: CheckContext, scheduler: dict[str, Any], expected: str) -> None:
    assert texts(context, scheduler) == [expected]


@pytest.mark.parametrize(
    "scheduler",
    [
        {},
        {"lr_warmup_steps": 9, "min_lr": 0.01, "init_lr": 0.01},
        {"lr_warmup_steps": 4, "lr_decay_style": "WSD", "wsd_decay_steps": 6, "lr_wsd_decay_style": "linear"},
        {"lr_decay_steps": 40},
    ],
)
def test_what_fits_the_run_is_right(scheduler: dict[str, Any]) -> None:
    assert texts(CONTEXT, scheduler) == []
    assert texts(evolve(CONTEXT, num_train_steps=None), {"lr_warmup_steps": 99}) == []


REACHED = "while the run makes 10 optimizer steps: {} is all that it reaches"
PLACE = "schedule: trainer.megatron.scheduler takes its place: "


@pytest.mark.parametrize(
    ("schedule", "scheduler", "expected"),
    [
        (
            ScheduleSpec(warmup_steps=40),
            {"lr_warmup_steps": 18, "lr_decay_steps": 40},
            [
                f"{PLACE}its lr_warmup_steps is read, and no warmup_steps",
                f"trainer.megatron.scheduler.lr_warmup_steps: 18, {REACHED.format('0.005')}",
            ],
        ),
        (
            ScheduleSpec(warmup_steps=18),
            {"lr_decay_steps": 40, "min_lr": 0.001},
            [
                f"{PLACE}it takes from here what it does not say itself",
                f"schedule.warmup_steps: 18, {REACHED.format('0.005')}",
            ],
        ),
        (
            ScheduleSpec(warmup_steps=40, decay="linear", min_learning_rate_ratio=0.1),
            {"lr_warmup_steps": 2, "lr_decay_style": "cosine", "min_lr": 0.001},
            [
                f"{PLACE}its lr_warmup_steps is read, and no warmup_steps, its lr_decay_style is read, and no decay, "
                "its min_lr is read, and no min_learning_rate_ratio"
            ],
        ),
    ],
)
def test_of_two_schedules_the_one_that_is_used_is_told(
    schedule: ScheduleSpec, scheduler: dict[str, Any], expected: list[str]
) -> None:
    assert texts(evolve(CONTEXT, schedule=schedule), scheduler) == expected
