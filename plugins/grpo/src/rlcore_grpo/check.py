"""What is wrong with a recipe's `[algorithm.grpo]` that no single field shows."""

from collections.abc import Sequence

from rlcore.spi import CheckContext, Problem
from rlcore_grpo.config import GrpoConfig
from rlcore_grpo.loss_check import loss_problems


def check(context: CheckContext, config: GrpoConfig) -> Sequence[Problem]:
    """Return the impossible combinations of options."""
    problems = loss_problems(config)
    if config.advantage_per == "turn" and context.max_turns == 1:
        problems.append(
            Problem(
                path="algorithm.grpo.advantage_per",
                found='"turn", with episodes of one turn, or of agents, whose rewards are not told apart by turns',
                expected='"episode"',
                remedy="Raise rollout.max_turns where the environment takes several turns.",
            )
        )
    return problems
