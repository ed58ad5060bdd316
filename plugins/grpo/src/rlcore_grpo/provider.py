"""The provider for the entry point."""

from rlcore.spi import Provider
from rlcore_grpo.config import GrpoConfig

PROVIDER = Provider(
    name="grpo",
    spi=(2, 0),
    priority=50,
    config=GrpoConfig,
    backend="rlcore_grpo.algorithm:Grpo",
    check="rlcore_grpo.check:check",
)
