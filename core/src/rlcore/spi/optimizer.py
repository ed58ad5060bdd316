"""What every trainer optimizes with, whichever a recipe takes: the sections `[optimizer]` and `[schedule]`."""

from typing import Literal

from attrs import frozen


@frozen(kw_only=True)
class OptimizerSpec:
    """`[optimizer]`: AdamW (arXiv:1711.05101), the same under every trainer."""

    learning_rate: float = 1e-6
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the running means of the gradient and of its square."""
    eps: float = 1e-8
    """Added to the square root of the second moment."""
    weight_decay: float = 0.0
    """Decoupled decay of weight matrices; biases and norms are never decayed."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global L2 norm; 0.0 never."""


@frozen(kw_only=True)
class ScheduleSpec:
    """`[schedule]`: the learning rate over the run's optimizer steps."""

    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly; the last of them is the first at the peak."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Its course from the end of the warm-up to the end of the run."""
    min_learning_rate_ratio: float = 0.0
    """Where a decay ends, as a share of the peak."""
