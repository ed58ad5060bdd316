"""The provider for the entry point; it imports nothing heavy."""

import sys

from rlcore.spi import SPI_VERSION, Provider, capabilities
from rlcore_code.config import CodeConfig, num_processes


def unavailable() -> str | None:
    """Why programs cannot be run here."""
    return None if sys.platform == "linux" else f"found {sys.platform}; expected Linux, whose limits hold the programs"


CODE = Provider(
    name="code",
    spi=SPI_VERSION,
    config=CodeConfig,
    backend="rlcore_code.environment:CodeEnvironment",
    capabilities={capabilities.CHEAP_RESET},
    unavailable=unavailable,
    check="rlcore_code.checks:check_code",
    max_concurrent=num_processes,
)
