"""The entry point: describes the generator without importing torch."""

from rlcore.spi import Provider, capabilities
from rlcore_torchkit.json_schema import STRUCTURED_OUTPUT
from rlcore_torchkit.requirements import missing_requirement
from rlcore_transformers.config import TransformersConfig

PROVIDER = Provider(
    name="transformers",
    spi=(2, 0),
    priority=20,
    capabilities={
        *capabilities.SAMPLING,
        *STRUCTURED_OUTPUT,
        capabilities.CONTINUOUS,
        capabilities.TOKEN_STREAMING,
        capabilities.PROMPT_LOGPROBS,
        capabilities.ROUTED_EXPERTS,
        capabilities.SAMPLING_MASK,
        capabilities.OWN_WEIGHTS,
        capabilities.ADAPTER_REFIT,
        capabilities.RESIDENCY,
        capabilities.DISCARD_WEIGHTS,
        capabilities.PROCESS_CHANNELS,
        capabilities.IN_PROCESS,
    },
    config=TransformersConfig,
    unavailable=missing_requirement,
    backend="rlcore_transformers.backend:TransformersBackend",
    check="rlcore_transformers.check:check",
)
"""The provider, which the entry point names."""
