"""The provider for the entry point; it imports nothing heavy."""

from operator import attrgetter

from rlcore.spi import SPI_VERSION, Provider, capabilities
from rlcore_harbor.config import HarborConfig

HARBOR = Provider(
    name="harbor",
    spi=SPI_VERSION,
    config=HarborConfig,
    backend="rlcore_harbor.environment:HarborBackend",
    capabilities={capabilities.AGENT},
    max_concurrent=attrgetter("max_concurrent"),
    check="rlcore_harbor.check:check",
)
