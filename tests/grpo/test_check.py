"""What is wrong with the options of the loss and of advantages is told of the section that has them."""

import pytest

from rlcore.spi import CheckContext, ModelSpec
from rlcore_grpo.check import check
from rlcore_grpo.config import GrpoConfig
from rlcore_grpo.presets import DapoConfig

CONTEXT = CheckContext(model=ModelSpec(path="model"), device="cpu", world_size=1, max_sequence_length=8)


@pytest.mark.parametrize(("config", "section"), [(GrpoConfig, "algorithm.grpo"), (DapoConfig, "algorithm.dapo")])
def test_problems_are_of_the_section_that_has_them(config, section):
    assert not check(CONTEXT, config())
    problems = check(CONTEXT, config(constant_length=3, reward_weights={"answer": 2.0}))
    assert {problem.path for problem in problems} == {f"{section}.constant_length", f"{section}.reward_weights"}
