"""The recipe section `[environment.verifiers]`."""

from collections.abc import Mapping
from typing import Annotated, TypeAlias

from attrs import field, frozen

from rlcore.schema.constraints import Constraint, Count, Finite, at_least

Argument: TypeAlias = str | bool | int | float | tuple[str | bool | int | float, ...]

_NAMED = Constraint("a name", lambda value: bool(value.strip()))


@frozen(kw_only=True)
class VerifiersConfig:
    """`[environment.verifiers]`: an environment written for the package `verifiers`, as those of its hub are."""

    name: Annotated[str, _NAMED]
    """Name of the environment, such as "gsm8k" or "owner/gsm8k"; its package has to be installed."""
    args: Mapping[str, Argument] = field(factory=dict)
    """Arguments of its function `load_environment`."""
    num_evaluation: Count = 0
    """Tasks held out from the end of the training data, if the environment has no evaluation data of its own."""
    success_reward: Finite | None = None
    """The reward from which on a task counts as solved; none: the environment's `pass_threshold`."""
    max_concurrent: Annotated[int, at_least(1)] = 64
    """Most episodes at once."""
