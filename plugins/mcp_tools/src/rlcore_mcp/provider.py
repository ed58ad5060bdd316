"""The provider for the entry point; it imports nothing heavy."""

from rlcore.installed import is_installed
from rlcore.spi import SPI_VERSION, Provider, capabilities
from rlcore_mcp.config import McpConfig, reward_config


def _unavailable() -> str | None:
    return None if is_installed("mcp") else "no package mcp. Install: pip install 'mcp>=2,<3'"


def _max_concurrent(config: McpConfig) -> int:
    from rlcore_rewards.environment import max_concurrent  # which listing the plugins does not need

    return max_concurrent(reward_config(config))


MCP = Provider(
    name="mcp",
    spi=SPI_VERSION,
    config=McpConfig,
    backend="rlcore_mcp.environment:McpEnvironment",
    capabilities={capabilities.CHEAP_RESET, capabilities.REWARD_FUNCTIONS},
    unavailable=_unavailable,
    max_concurrent=_max_concurrent,
    check="rlcore_mcp.check:check",
)
