"""`[async]`: how far generation may run ahead of training."""

from typing import Annotated, Literal

from attrs import frozen

from rlcore.schema.constraints import Count, between


@frozen(kw_only=True)
class AsyncConfig:
    """`[async]`: how far generation may run ahead of training."""

    max_staleness: Annotated[int, between(0, 1000)] = 0
    """Most steps between the weights that start a sample and the step that trains on it. 0 is on-policy. Above 0, generation
    goes on during training: on its own devices all the time, on shared devices in turns. A turn ends once a step's samples are
    complete; unfinished samples continue in the next."""
    on_stale: Literal["wait", "drop", "rescore"] = "wait"
    """Handling of samples that would exceed the bound. "wait": the step waits for them. "drop": their groups are dropped and
    counted. "rescore": they are trained on whenever they end, and the trainer's log-probabilities replace the generator's at
    tokens beyond the bound."""
    partial_rollouts: Literal["continue", "restart"] = "continue"
    """Handling of unfinished samples when the weights change. "continue": they go on with the new weights, and each token has
    the version of its weights. "restart": they begin again."""
    extra_prompts: Count = 0
    """Prompts that are sampled beyond a step's own, so that no step waits for its slowest. Not with `on_stale = "wait"`."""
