"""The entry point: describes the trainer without importing torch."""

from rlcore.spi import Provider, capabilities, channel_capabilities
from rlcore_fsdp2.config import Fsdp2Config
from rlcore_torchkit.requirements import missing_requirement

PROVIDER = Provider(
    name="fsdp2",
    spi=(2, 0),
    priority=50,
    capabilities={
        capabilities.REFERENCE_POLICY,
        capabilities.ENTROPY,
        capabilities.SAVE_HF,
        capabilities.METRIC_BOUNDS,
        capabilities.PREVIOUS_LOGPROBS,
        capabilities.STEP_LOGPROBS,
        capabilities.SCHEDULE_STEP,
        capabilities.MULTI_RANK,
        capabilities.ROUTING_REPLAY,
        capabilities.RESIDENCY,
        *channel_capabilities(),
    },
    config=Fsdp2Config,
    unavailable=missing_requirement,
    backend="rlcore_fsdp2.backend:Fsdp2Backend",
    check="rlcore_fsdp2.check:check",
)
