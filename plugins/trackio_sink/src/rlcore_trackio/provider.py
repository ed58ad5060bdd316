"""The entry point: describes the sink without importing the tracker."""

from rlcore.spi import Provider
from rlcore_trackio.config import TrackioConfig

PROVIDER = Provider(name="trackio", spi=(2, 0), config=TrackioConfig, backend="rlcore_trackio.sink:TrackioSink")
"""The provider for the entry point."""
