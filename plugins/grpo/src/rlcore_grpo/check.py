"""What is wrong with a recipe's `[algorithm.grpo]`, or the section of one of its presets, that no single field shows."""

from collections.abc import Sequence

from attrs import evolve

from rlcore.spi import CheckContext, Problem
from rlcore_grpo.advantage_check import advantage_problems
from rlcore_grpo.config import GrpoConfig
from rlcore_grpo.loss_check import loss_problems


def check(context: CheckContext, config: GrpoConfig) -> Sequence[Problem]:
    """Return the impossible combinations of options."""
    problems = [*advantage_problems(context, config), *loss_problems(config)]
    return [evolve(problem, path=problem.path.replace(GrpoConfig.section, config.section, 1)) for problem in problems]
