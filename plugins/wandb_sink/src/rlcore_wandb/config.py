"""The section `[sinks.wandb]`."""

from typing import Literal

from attrs import frozen

from rlcore_workers.metric_names import MetricNamesConfig


@frozen(kw_only=True)
class WandbConfig(MetricNamesConfig):
    """`[sinks.wandb]`: Weights & Biases. The key comes from `wandb login` or WANDB_API_KEY."""

    project: str = "rlcore"
    """Its project."""
    entity: str | None = None
    """The user or team; the account's own where it is left out."""
    group: str | None = None
    """The group of the run."""
    tags: tuple[str, ...] = ()
    """Tags of the run."""
    mode: Literal["online", "offline"] | None = None
    """"offline" writes into the run directory's folder `wandb`, for `wandb sync`; without it WANDB_MODE decides."""
