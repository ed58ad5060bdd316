"""The entry point: describes the trainer without importing torch or Megatron."""

from rlcore.spi import Provider, capabilities, channel_capabilities
from rlcore_megatron.config import MegatronConfig
from rlcore_megatron.requirements import missing_requirement

PROVIDER = Provider(
    name="megatron",
    spi=(2, 0),
    priority=80,
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
    config=MegatronConfig,
    # Without a GPU it runs where it is named; what fits a CPU trains faster without Megatron around it.
    devices={"cuda"},
    unavailable=missing_requirement,
    backend="rlcore_megatron.backend:MegatronBackend",
    check="rlcore_megatron.check:check",
)
