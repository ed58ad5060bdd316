"""What is wrong with a recipe's `[algorithm.grpo]` that no single field shows."""

from collections.abc import Sequence

from rlcore.spi import CheckContext, Problem
from rlcore_grpo.config import GrpoConfig


def check(context: CheckContext, config: GrpoConfig) -> Sequence[Problem]:
    """Return the impossible combinations of options."""
    problems = []
    if (config.loss_normalisation == "constant") != (config.constant_length is not None):
        problems.append(
            Problem(
                path="algorithm.grpo.constant_length",
                found=f"{config.constant_length or 'none'} with loss_normalisation = {config.loss_normalisation!r}",
                expected='a length with loss_normalisation = "constant", and none with any other',
                remedy="Set it to rollout.max_response_tokens, or leave out both.",
            )
        )
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
