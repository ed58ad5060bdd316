"""Checks of `[algorithm.ppo]` across its fields."""

from collections.abc import Sequence

from rlcore.spi import CheckContext, Problem
from rlcore_ppo.config import PpoConfig
from rlcore_torchkit.rl.endpoint_config import endpoint_problems


def check(context: CheckContext, config: PpoConfig) -> Sequence[Problem]:  # noqa: ARG001
    """Return the options that do nothing beside the others."""
    default = PpoConfig()
    needs = {
        "reference_endpoint": (config.kl_coefficient > 0, "kl_coefficient above 0"),
        "kl_estimator": (config.kl_coefficient > 0, "kl_coefficient above 0"),
        "advantage_epsilon": (config.advantage_normalisation != "none", 'advantage_normalisation = "batch_whitening"'),
        "importance_maximum": (config.importance_correction != "none", 'importance_correction = "token"'),
    }
    endpoint = config.reference_endpoint
    unused = [
        Problem(
            path=f"algorithm.ppo.{name}",
            found=f"{getattr(config, name)!r} without {needed}, so that it does nothing",
            expected=f"{needed}, or no such key",
            remedy="Leave the key out.",
        )
        for name, (is_used, needed) in needs.items()
        if not is_used and getattr(config, name) != getattr(default, name)
    ]
    return [*unused, *([] if endpoint is None else endpoint_problems("algorithm.ppo.reference_endpoint", endpoint))]
