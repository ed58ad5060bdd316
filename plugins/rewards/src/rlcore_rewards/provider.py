"""Providers of the environments `function` and `judge`."""

from rlcore.spi import Provider, capabilities
from rlcore_rewards.config import FunctionConfig
from rlcore_rewards.judge_config import JudgeConfig


def _max_concurrent(config: FunctionConfig) -> int:
    from rlcore_rewards.environment import max_concurrent  # which listing the plugins does not need

    return max_concurrent(config)


FUNCTION = Provider(
    name="function",
    spi=(2, 0),
    config=FunctionConfig,
    backend="rlcore_rewards.environment:FunctionBackend",
    capabilities={capabilities.CHEAP_RESET, capabilities.REWARD_FUNCTIONS},
    max_concurrent=_max_concurrent,
    check="rlcore_rewards.environment:check",
)

JUDGE = Provider(
    name="judge",
    spi=(2, 0),
    config=JudgeConfig,
    backend="rlcore_rewards.judge:JudgeBackend",
    capabilities={capabilities.CHEAP_RESET},
    max_concurrent=lambda config: config.max_concurrent,
    check="rlcore_rewards.judge:check",
)
