"""What is wrong with the options of the loss that no single field shows."""

from rlcore.spi import Problem
from rlcore_grpo.loss_config import LossConfig


def loss_problems(config: LossConfig) -> list[Problem]:
    """The combinations of options that make no sense."""
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
    return problems
