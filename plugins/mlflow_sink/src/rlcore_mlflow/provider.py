"""The entry point: describes the sink without importing the tracker."""

from rlcore.spi import Provider
from rlcore_mlflow.config import MlflowConfig

PROVIDER = Provider(name="mlflow", spi=(2, 0), config=MlflowConfig, backend="rlcore_mlflow.sink:MlflowSink")
"""The provider for the entry point."""
