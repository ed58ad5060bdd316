"""Truncated sampling: what it takes that generator and trainer speak of one distribution."""

from rlcore.config.recipe import Recipe, RolloutConfig
from rlcore.spi import AlgorithmNeeds


def replays_sampling_mask(recipe: Recipe, needs: AlgorithmNeeds) -> bool:
    """Return whether the generator reports the kept tokens of truncated sampling, for the trainer to normalise over."""
    rollout = recipe.rollout
    return needs.untruncated_sampling and rollout.truncates and not rollout.accept_truncation_bias


def mask_needs(recipe: Recipe, capability: str) -> dict[str, str]:
    """The capability that generator or trainer needs for that, with the keys that ask for it and what may be done without."""
    rollout, default = recipe.rollout, RolloutConfig()
    values = {f"rollout.{key}": (getattr(rollout, key), getattr(default, key)) for key in ("top_k", "top_p")}
    keys = " and ".join(f"{key} = {value}" for key, (value, whole) in values.items() if value != whole)
    compares = f"algorithm {recipe.algorithm.name!r} compares the generator's probabilities with the trainer's"
    without = "without it, sample from the whole distribution, or accept a bias with rollout.accept_truncation_bias = true"
    return {capability: f"{keys}, and {compares}; {without}"}
