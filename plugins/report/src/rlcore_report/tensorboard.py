"""Sink `tensorboard`: event files for TensorBoard."""

from collections.abc import Mapping

from attrs import frozen

from rlcore.files import storage_errors
from rlcore.installed import is_installed
from rlcore.spi import SPI_VERSION, Provider, SinkContext
from rlcore_workers.metric_names import MetricNamesConfig, renamed


@frozen(kw_only=True)
class TensorBoardConfig(MetricNamesConfig):
    """`[sinks.tensorboard]`: writes event files into the folder `tensorboard`; needs `rlcore-report[tensorboard]`."""


class TensorBoardSink:
    """Each metric is a scalar."""

    def __init__(self, context: SinkContext, config: TensorBoardConfig) -> None:
        from tensorboard.summary import Writer

        self._names_as = config.names_as
        with storage_errors("TensorBoard's events", context.run_directory):
            self._writer = Writer(str(context.run_directory / "tensorboard"))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the scalars; they are on disk when this returns."""
        self._write(step, renamed(metrics, self._names_as))

    def log_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the scalars, at a step that may be an earlier one."""
        self._write(step, metrics)

    def _write(self, step: int, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, summary: Mapping[str, object] | None) -> None:  # noqa: ARG002 - only the steps are drawn
        """Close the file."""
        self._writer.close()


def _unavailable() -> str | None:
    return (
        None
        if is_installed("tensorboard")
        else "the package tensorboard is not installed: pip install 'rlcore-report[tensorboard]'"
    )


TENSORBOARD = Provider(
    name="tensorboard",
    spi=SPI_VERSION,
    config=TensorBoardConfig,
    backend="rlcore_report.tensorboard:TensorBoardSink",
    unavailable=_unavailable,
)
