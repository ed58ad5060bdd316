"""The section `[sinks.trackio]`."""

from attrs import frozen

from rlcore_workers.metric_names import MetricNamesConfig


@frozen(kw_only=True)
class TrackioConfig(MetricNamesConfig):
    """`[sinks.trackio]`: Trackio, in a local database below TRACKIO_DIR or in a Space."""

    project: str = "rlcore"
    """Its project."""
    group: str | None = None
    """The group of the run."""
    tags: tuple[str, ...] = ()
    """Kept in the run's configuration as `tags`."""
    space_id: str | None = None
    """A Space of the Hub, "user/name", which is made where it is not there; None for this machine's database."""
