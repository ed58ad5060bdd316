"""The provider for the entry point."""

from rlcore.spi import Provider
from rlcore_dpo.config import DpoConfig

PROVIDER = Provider(
    name="dpo",
    spi=(2, 0),
    priority=50,
    config=DpoConfig,
    backend="rlcore_dpo.algorithm:Dpo",
    check="rlcore_dpo.check:check",
)
