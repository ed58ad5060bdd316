"""The optimizer and schedule of every trainer: the sections `[optimizer]` and `[schedule]`."""

import math
from typing import Annotated, Literal, TypeAlias

from attrs import frozen

from rlcore.schema.constraints import Share, above, at_least, at_least_below

Beta: TypeAlias = Annotated[float, at_least_below(0, 1)]


@frozen(kw_only=True)
class OptimizerSpec:
    """`[optimizer]`: AdamW (arXiv:1711.05101), the same under every trainer."""

    learning_rate: Annotated[float, above(0)] = 1e-6
    """Peak learning rate."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay of the running means of the gradient and of its square."""
    eps: Annotated[float, above(0)] = 1e-8
    """Added to the square root of the second moment."""
    weight_decay: Annotated[float, at_least(0)] = 0.0
    """Decoupled decay of weight matrices; biases and norms are never decayed."""
    max_grad_norm: Annotated[float, at_least(0, "0.0 never scales gradients down.")] = 1.0
    """Gradients are scaled down to this global L2 norm; 0.0 never."""


@frozen(kw_only=True)
class ScheduleSpec:
    """`[schedule]`: the learning rate over the run's optimizer steps."""

    warmup_steps: Annotated[int, at_least(0, "0 starts at the peak.")] = 0
    """Steps over which the learning rate rises linearly; the last of them is the first at the peak."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """The learning rate's course from the end of the warm-up to the end of the run."""
    min_learning_rate_ratio: Share = 0.0
    """The end of a decay, as a share of the peak."""

    def share(self, step: int, num_steps: int) -> float:
        """The learning rate of optimizer step `step`, counted from 0, in a run of `num_steps`, as a share of the peak.

        Steps 0 … warmup_steps-1 rise as (step+1)/warmup_steps. The decay starts at 1 in step warmup_steps and reaches
        min_learning_rate_ratio in step `num_steps`, where it stays.
        """
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.decay == "constant":
            return 1.0
        num_decay_steps = max(1, num_steps - self.warmup_steps)
        progress = min(1.0, (step - self.warmup_steps) / num_decay_steps)
        remaining = 1.0 - progress if self.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.min_learning_rate_ratio + (1.0 - self.min_learning_rate_ratio) * remaining
