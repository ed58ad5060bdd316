"""The provider for the entry point; it imports nothing heavy."""

from operator import attrgetter

from rlcore.spi import SPI_VERSION, Provider, capabilities
from rlcore_nemo_gym.config import NemoGymConfig

NEMO_GYM = Provider(
    name="nemo_gym",
    spi=SPI_VERSION,
    config=NemoGymConfig,
    backend="rlcore_nemo_gym.environment:NemoGymBackend",
    capabilities={capabilities.AGENT},
    max_concurrent=attrgetter("max_concurrent"),
    check="rlcore_nemo_gym.check:check",
)
