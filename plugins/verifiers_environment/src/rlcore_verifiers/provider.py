"""The provider for the entry point; it imports nothing heavy."""

from operator import attrgetter

from rlcore.spi import SPI_VERSION, Provider, capabilities
from rlcore_verifiers.config import VerifiersConfig
from rlcore_verifiers.package import unavailable

VERIFIERS = Provider(
    name="verifiers",
    spi=SPI_VERSION,
    config=VerifiersConfig,
    backend="rlcore_verifiers.environment:VerifiersEnvironment",
    capabilities={capabilities.AGENT},
    max_concurrent=attrgetter("max_concurrent"),
    unavailable=unavailable,
    check="rlcore_verifiers.package:check",
)
