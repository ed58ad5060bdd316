"""Providers of the environments of this package, to which the core's entry points lead."""

from rlcore.rewards.config import FunctionConfig
from rlcore.rewards.judge_config import JudgeConfig
from rlcore.rewards.python import PythonConfig
from rlcore.spi import Provider, capabilities


def _max_concurrent(config: FunctionConfig) -> int:
    from rlcore.rewards.environment import max_concurrent  # which listing the plugins does not need

    return max_concurrent(config)


FUNCTION = Provider(
    name="function",
    spi=(2, 0),
    config=FunctionConfig,
    backend="rlcore.rewards.environment:FunctionBackend",
    capabilities={capabilities.CHEAP_RESET},
    max_concurrent=_max_concurrent,
    check="rlcore.rewards.environment:check",
)

PYTHON = Provider(name="python", spi=(2, 0), config=PythonConfig, backend="rlcore.rewards.python:NotGiven")

JUDGE = Provider(
    name="judge",
    spi=(2, 0),
    config=JudgeConfig,
    backend="rlcore.rewards.judge:JudgeBackend",
    capabilities={capabilities.CHEAP_RESET},
    max_concurrent=lambda config: config.max_concurrent,
    check="rlcore.rewards.judge:check",
)
