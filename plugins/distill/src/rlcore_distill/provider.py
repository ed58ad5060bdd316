"""The providers for the entry points."""

from rlcore.spi import Provider, capabilities
from rlcore_distill.config import DistillConfig, UnrewardedConfig

PROVIDER = Provider(
    name="distill",
    spi=(2, 0),
    config=DistillConfig,
    backend="rlcore_distill.algorithm:Distill",
    check="rlcore_distill.check:check",
)
UNREWARDED = Provider(
    name="unrewarded",
    spi=(2, 0),
    config=UnrewardedConfig,
    backend="rlcore_distill.environment:Unrewarded",
    capabilities={capabilities.CHEAP_RESET, capabilities.NO_REWARDS},
)
