"""The providers for the entry points."""

from rlcore.spi import Provider
from rlcore_dpo.config import DpoConfig, OnlineDpoConfig, OrpoConfig
from rlcore_dpo.kto_config import KtoConfig

PROVIDER = Provider(
    name="dpo",
    spi=(2, 0),
    priority=50,
    config=DpoConfig,
    backend="rlcore_dpo.algorithm:Dpo",
    check="rlcore_dpo.check:check",
)
ORPO = Provider(
    name="orpo",
    spi=(2, 0),
    priority=50,
    config=OrpoConfig,
    backend="rlcore_dpo.algorithm:Dpo",
    check="rlcore_dpo.check:check",
)
ONLINE_DPO = Provider(
    name="online_dpo",
    spi=(2, 0),
    priority=50,
    config=OnlineDpoConfig,
    backend="rlcore_dpo.online:OnlineDpo",
    check="rlcore_dpo.check:check",
)
KTO = Provider(name="kto", spi=(2, 0), priority=50, config=KtoConfig, backend="rlcore_dpo.kto:Kto")
