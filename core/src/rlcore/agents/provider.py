"""Provider of the environment `agent`, to which the core's entry point leads."""

from rlcore.agents.config import AgentConfig
from rlcore.spi import Provider, capabilities

AGENT = Provider(
    name="agent",
    spi=(2, 0),
    config=AgentConfig,
    backend="rlcore.agents.environment:AgentBackend",
    capabilities={capabilities.AGENT},
    max_concurrent=lambda config: config.max_concurrent,
    check="rlcore.agents.environment:check",
)
