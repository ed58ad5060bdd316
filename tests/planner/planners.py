"""Planners of a trainer and a generator whose figures are round."""

from collections.abc import Callable, Sequence

from rlcore.spi import PlanContext, PlanOption

GIB = 2**30
SEEN: Callable[[PlanContext], object] = id
"""Gets what the trainer's planner is told."""


def plan_trainer(context: PlanContext, config: object) -> Sequence[PlanOption]:
    """State of 400 GiB over all devices; a second layout needs half of it and takes twice as long."""
    SEEN(context)
    size = 400 * GIB // context.world_size
    return [
        PlanOption(
            options={} if saves == 1 else {"delay_s": 1.0},
            memory={"weights": size // saves, "activations": 10 * GIB},
            idle={"none": size // saves, "state": size // saves // 2, "all": 0},
            seconds={"training": 160.0 * saves / context.world_size, "log-probabilities": 8.0 / context.world_size},
            assumptions=("Trainers are fakes.",),
        )
        for saves in (1, 2)
    ]


def plan_judge(context: PlanContext, config: object) -> Sequence[PlanOption]:
    """A model of 8 GiB on the first device."""
    return [PlanOption(memory={"weights": 8 * GIB}, seconds={})]


def plan_generator(context: PlanContext, config: object) -> Sequence[PlanOption]:
    """Weights of 20 GiB; the cache takes the rest, and less of it takes longer."""
    cache = max(GIB, context.free_bytes - 20 * GIB)
    return [
        PlanOption(
            memory={"engine's weights": 20 * GIB, "KV cache": cache},
            idle={"none": 2 * GIB},
            seconds={"generation": 80.0 / context.world_size * (1 + 20 * GIB / cache), "refit": 1.0},
        )
    ]
