"""The entry point: describes the generator without importing the client."""

from rlcore.spi import Provider, capabilities
from rlcore_openai.config import OpenAIConfig

PROVIDER = Provider(
    name="openai",
    spi=(2, 0),
    priority=0,
    # Whether seeds and log-probabilities are exact is the endpoint's affair, which one probe cannot tell.
    capabilities={
        capabilities.TOP_K,
        capabilities.TOP_P,
        capabilities.STOP_STRINGS,
        capabilities.STREAMING,
        capabilities.CONTINUOUS,
        capabilities.OWN_WEIGHTS,
    },
    config=OpenAIConfig,
    devices=frozenset(),  # "auto" never takes it
    backend="rlcore_openai.backend:OpenAIBackend",
    check="rlcore_openai.check:check",
    reads_model=False,
)
"""The provider that the entry point names."""
