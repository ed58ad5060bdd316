"""What of the optimizer is the critic's own."""

from rlcore.config.model import CriticConfig
from rlcore.spi import OptimizerGroup, OptimizerSpec

POLICY = OptimizerSpec(learning_rate=1e-6, betas=(0.8, 0.9), weight_decay=0.1, max_grad_norm=2.0)


def test_what_the_section_leaves_out_is_the_policys() -> None:
    assert CriticConfig().optimizer(POLICY) == POLICY


def test_what_it_says_is_the_critics_also_where_it_is_0() -> None:
    own = CriticConfig(learning_rate=1e-5, weight_decay=0.0, max_grad_norm=0.0).optimizer(POLICY)
    assert own == OptimizerSpec(learning_rate=1e-5, betas=(0.8, 0.9), weight_decay=0.0, max_grad_norm=0.0)


def test_kind_moments_and_groups_are_the_policys_or_its_own() -> None:
    groups = (OptimizerGroup(parameters=("lm_head.weight",), learning_rate=1e-4),)
    policy = OptimizerSpec(name="muon", moments="8bit", groups=groups)
    assert CriticConfig().optimizer(policy) == policy
    assert CriticConfig(name="adamw", moments="float32", groups=()).optimizer(policy) == OptimizerSpec()
