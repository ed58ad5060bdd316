"""The provider for the entry point; it imports nothing heavy."""

from rlcore.installed import is_installed
from rlcore.spi import SPI_VERSION, Provider, capabilities
from rlcore_textarena.config import TextArenaConfig


def unavailable() -> str | None:
    """Why there are no games; None where there are."""
    missing = [name for name in ("textarena", "openai") if not is_installed(name)]
    return f"no package {' and no package '.join(missing)}. Install: pip install {' '.join(missing)}" if missing else None


PROVIDER = Provider(
    name="textarena",
    spi=SPI_VERSION,
    config=TextArenaConfig,
    backend="rlcore_textarena.environment:TextArenaEnvironment",
    capabilities={capabilities.AGENT},
    unavailable=unavailable,
    max_concurrent=lambda config: config.max_concurrent,
    check="rlcore_textarena.check:check",
)
