"""The provider for the entry point."""

from rlcore.spi import Provider
from rlcore_ppo.config import PpoConfig

PROVIDER = Provider(
    name="ppo",
    spi=(2, 0),
    priority=50,
    config=PpoConfig,
    backend="rlcore_ppo.algorithm:Ppo",
    check="rlcore_ppo.check:check",
)
