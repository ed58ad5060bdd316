"""The provider for the entry point; it imports nothing heavy."""

from rlcore.spi import SPI_VERSION, Provider, capabilities
from rlcore_openenv.config import OpenEnvConfig

OPENENV = Provider(
    name="openenv",
    spi=SPI_VERSION,
    config=OpenEnvConfig,
    backend="rlcore_openenv.environment:OpenEnvBackend",
    capabilities={capabilities.AGENT},
    max_concurrent=lambda config: max(len(config.urls), 1) * config.max_concurrent,
    check="rlcore_openenv.check:check",
)
