"""The options of `[algorithm.grpo]` that say how rewards become advantages, on the driver."""

from typing import Annotated, Literal

from attrs import frozen

from rlcore.schema.constraints import at_least_below


@frozen(kw_only=True)
class AdvantageConfig:
    """How rewards become advantages."""

    advantage_baseline: Literal["group_mean", "leave_one_out"] = "group_mean"
    """What is subtracted from a reward: the mean of its group, or the mean of the group's other rewards."""
    advantage_normalisation: Literal["std", "none"] = "std"
    """Divide the group's advantages by the standard deviation of its rewards, or leave them."""
    advantage_per: Literal["episode", "turn"] = "episode"
    """Compare what episodes of a group earned in all, or turn by turn what each earned from there on: the advantage of a turn k
    is then the sum of its episode's rewards from k on, less the baseline over the group's episodes that have a turn k."""
    advantage_epsilon: Annotated[float, at_least_below(0, 1)] = 1e-6
    """Added to that standard deviation. A group whose rewards are equal to rounding has advantages of 0 whatever it is."""
