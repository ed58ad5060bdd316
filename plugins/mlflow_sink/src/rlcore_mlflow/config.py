"""The section `[sinks.mlflow]`."""

from attrs import frozen

from rlcore_workers.metric_names import MetricNamesConfig


@frozen(kw_only=True)
class MlflowConfig(MetricNamesConfig):
    """`[sinks.mlflow]`: MLflow."""

    experiment: str = "rlcore"
    """Its experiment, which is made where it is not there."""
    tracking_uri: str | None = None
    """A server or a store; None for MLFLOW_TRACKING_URI."""
    tags: tuple[str, ...] = ()
    """Tags of the run, each "name" or "name=value"."""
