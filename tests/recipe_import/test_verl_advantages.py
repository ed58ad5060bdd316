"""Advantages of a step are those of verl's estimators."""

import numpy as np
import pytest

from . import peer_verl
from .peer_verl import Batch
from .verl_batches import Read, advantages_of, reported


@pytest.mark.parametrize("coefficient", [0.0, 0.2])
@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_advantages_are_verls(read_verl: Read, verl_batch: Batch, name: str, coefficient: float) -> None:
    """A KL term in the reward is reported where verl divides the reward after subtracting the term."""
    rewards, groups = np.array([1.0, 0.0, 0.5, 2.0, 0.0, 1.5]), np.array([0, 0, 0, 1, 1, 1])
    overrides = [f"algorithm.adv_estimator={name}", "algorithm.use_kl_in_reward=True"]
    found = read_verl(*overrides, f"algorithm.kl_ctrl.kl_coef={coefficient}")
    kl = peer_verl.kl_estimate(verl_batch.rollout, verl_batch.reference, "kl")
    expected = peer_verl.advantages(rewards, groups, kl, verl_batch.mask, name, coefficient)
    here = advantages_of(found, rewards, groups, verl_batch)
    is_reported = "algorithm.use_kl_in_reward" in reported(found)
    assert is_reported == (coefficient > 0 and name in ("grpo", "reinforce_plus_plus_baseline"))
    assert np.allclose(here, expected, rtol=1e-4, atol=1e-5) != is_reported
