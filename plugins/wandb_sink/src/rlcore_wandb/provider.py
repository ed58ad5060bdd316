"""The entry point: describes the sink without importing the tracker."""

from rlcore.spi import Provider
from rlcore_wandb.config import WandbConfig

PROVIDER = Provider(name="wandb", spi=(2, 0), config=WandbConfig, backend="rlcore_wandb.sink:WandbSink")
"""The provider for the entry point."""
