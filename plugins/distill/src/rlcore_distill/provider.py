"""The providers for the entry points."""

from rlcore.spi import Provider, capabilities
from rlcore_distill.config import DistillConfig, UnrewardedConfig
from rlcore_distill.self_config import SdftConfig, SdpoConfig

PROVIDER = Provider(
    name="distill",
    spi=(2, 0),
    config=DistillConfig,
    backend="rlcore_distill.algorithm:Distill",
    check="rlcore_distill.check:check",
)
SDFT = Provider(
    name="sdft",
    spi=(2, 0),
    config=SdftConfig,
    backend="rlcore_distill.self_distillation:Sdft",
    check="rlcore_distill.self_check:check",
)
SDPO = Provider(
    name="sdpo",
    spi=(2, 0),
    config=SdpoConfig,
    backend="rlcore_distill.self_distillation:Sdpo",
    check="rlcore_distill.self_check:check",
)
UNREWARDED = Provider(
    name="unrewarded",
    spi=(2, 0),
    config=UnrewardedConfig,
    backend="rlcore_distill.environment:Unrewarded",
    capabilities={capabilities.CHEAP_RESET, capabilities.NO_REWARDS},
)
