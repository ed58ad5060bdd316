"""The entry point: describes the trainer without importing torch."""

from rlcore.spi import CHANNELS, Provider, capabilities
from rlcore_fsdp2.config import Fsdp2Config
from rlcore_torchkit.requirements import TRAINER_CAPABILITIES, missing_requirement

PROVIDER = Provider(
    name="fsdp2",
    spi=(2, 0),
    priority=50,
    capabilities=TRAINER_CAPABILITIES
    | {
        CHANNELS["shards"].capability,
        capabilities.LORA,
        capabilities.ADAPTER_REFIT,
        capabilities.DELTA_REFIT,
        capabilities.IMAGES,
    },
    config=Fsdp2Config,
    unavailable=missing_requirement,
    backend="rlcore_fsdp2.backend:Fsdp2Backend",
    check="rlcore_fsdp2.check:check",
    plan="rlcore_fsdp2.plan:plan",
)
