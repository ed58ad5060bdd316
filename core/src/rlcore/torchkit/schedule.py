"""The learning rate as a pure function of the optimizer step."""

import math

from rlcore.spi.optimizer import ScheduleSpec


def learning_rate(peak: float, schedule: ScheduleSpec, step: int, num_steps: int) -> float:
    """The learning rate of optimizer step `step`, counted from 0, in a run of `num_steps`.

    Steps 0 … warmup_steps-1 rise as peak·(step+1)/warmup_steps. The decay starts at the peak in step warmup_steps and reaches
    peak·min_learning_rate_ratio in step `num_steps`, where it stays.
    """
    if step < schedule.warmup_steps:
        return peak * (step + 1) / schedule.warmup_steps
    if schedule.decay == "constant":
        return peak
    num_decay_steps = max(1, num_steps - schedule.warmup_steps)
    progress = min(1.0, (step - schedule.warmup_steps) / num_decay_steps)
    remaining = 1.0 - progress if schedule.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    least = schedule.min_learning_rate_ratio
    return peak * (least + (1.0 - least) * remaining)
