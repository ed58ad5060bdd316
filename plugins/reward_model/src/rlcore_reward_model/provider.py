"""The providers that the entry points name. This module imports nothing heavy."""

from rlcore.spi import Provider, capabilities
from rlcore_reward_model.config import RewardConfig, RewardModelConfig

ALGORITHM = Provider(
    name="bradley_terry",
    spi=(2, 0),
    priority=50,
    config=RewardConfig,
    backend="rlcore_reward_model.algorithm:RewardAlgorithm",
)

ENVIRONMENT = Provider(
    name="reward_model",
    spi=(2, 0),
    config=RewardModelConfig,
    backend="rlcore_reward_model.environment:RewardModelEnvironment",
    capabilities={capabilities.CHEAP_RESET, "rollout:one_process"},  # the model is there once
    check="rlcore_reward_model.check:check",
    plan="rlcore_reward_model.plan:plan",
)
