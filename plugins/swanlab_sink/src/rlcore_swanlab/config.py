"""The section `[sinks.swanlab]`."""

from typing import Literal

from attrs import frozen

from rlcore_workers.metric_names import MetricNamesConfig


@frozen(kw_only=True)
class SwanLabConfig(MetricNamesConfig):
    """`[sinks.swanlab]`: SwanLab, in its cloud, on a server of one's own, or in files of the run directory."""

    project: str = "rlcore"
    """Its project."""
    workspace: str | None = None
    """The user or organisation; None is the user that is logged in."""
    group: str | None = None
    """The group of the run."""
    tags: tuple[str, ...] = ()
    """Tags of the run."""
    mode: Literal["online", "offline", "local", "disabled"] | None = None
    """"online" sends everything as it comes; "offline" keeps it in the run directory's `swanlab` for `swanlab sync`; "local"
    keeps it there too. None is what SWANLAB_MODE says, or else "online"."""
