"""`[async]`: how far generation may run ahead of training."""

from typing import Annotated, Literal

from attrs import frozen

from rlcore.schema.constraints import Count, between


@frozen(kw_only=True)
class AsyncConfig:
    """`[async]`: how far generation may run ahead of training."""

    max_staleness: Annotated[int, between(0, 1000)] = 0
    """Steps that may be trained between the weights which a sample begins with and the step which trains on it. 0 samples each
    step with its own weights. Above it generation goes on while others train: on devices of its own all the time, on shared
    ones in turns, each of which ends once a step's samples are there; the unfinished ones go on in the next."""
    on_stale: Literal["wait", "drop", "rescore"] = "wait"
    """Handling of samples that would pass the bound: the step waits for them; or their groups are dropped and counted; or they
    are trained on whenever they end, and tokens beyond the bound get the trainer's log-probabilities in place of the
    generator's."""
    partial_rollouts: Literal["continue", "restart"] = "continue"
    """Handling of unfinished samples when the weights change: they go on with the new ones, each token with the version of its
    weights; or they begin again."""
    extra_prompts: Count = 0
    """Prompts that are sampled beyond those that steps need, so that no step waits for its slowest. Not with
    `on_stale = "wait"`."""
