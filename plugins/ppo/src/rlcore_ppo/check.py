"""Checks of `[algorithm.ppo]` across its fields."""

from collections.abc import Sequence

from rlcore.spi import CheckContext, Problem
from rlcore_ppo.config import PpoConfig


def check(context: CheckContext, config: PpoConfig) -> Sequence[Problem]:  # noqa: ARG001
    """Return the options that do nothing beside the others."""
    default = PpoConfig()
    needs = {
        "kl_estimator": (config.kl_coefficient > 0, "kl_coefficient above 0"),
        "advantage_epsilon": (config.advantage_normalisation != "none", 'advantage_normalisation = "batch_whitening"'),
        "importance_maximum": (config.importance_correction != "none", 'importance_correction = "token"'),
    }
    return [
        Problem(
            path=f"algorithm.ppo.{name}",
            found=f"{getattr(config, name)!r} without {needed}, so that it does nothing",
            expected=f"{needed}, or no such key",
            remedy="Leave the key out.",
        )
        for name, (is_used, needed) in needs.items()
        if not is_used and getattr(config, name) != getattr(default, name)
    ]
