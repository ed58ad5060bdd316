"""Weights of prompts by the rewards of their samples.

A package adds its own function to the group `rlcore.prompt_weights`, in `pyproject.toml`::

    [project.entry-points."rlcore.prompt_weights"]
    uncertain = "my_package.weights:uncertain"

In `my_package/weights.py`::

    def uncertain(outcomes: PromptOutcomes) -> NDArray[np.float64]:
        return 1 / np.maximum(outcomes.num_groups, 1)

A recipe names it: `data.prompt_weights = "uncertain"`.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import numpy as np
from attrs import fields, frozen
from numpy.typing import NDArray

from rlcore.registry.run_parts import functions
from rlcore.registry.states import named_state
from rlcore.spi import CheckpointError, PluginError
from rlcore.spi.arrays import Int64Array

Float64Array: TypeAlias = NDArray[np.float64]
KIND = "prompt_weight"
UNIFORM_SHARE = 0.1
"""The least rate of a prompt, as a share of the greatest (the share ρ of prioritised level replay, arXiv:2010.03934)."""


@frozen(kw_only=True, eq=False)
class PromptOutcomes:
    """The rewards of N rows' groups of samples. Of a row without a group all are 0."""

    num_groups: Int64Array
    """int64 [N]: groups so far."""
    mean: Float64Array
    """float64 [N]: the mean reward of the last group."""
    variance: Float64Array
    """float64 [N]: the variance of the last group's rewards (ddof = 0), p(1 - p) for rewards of 0 and 1."""
    success: Float64Array
    """float64 [N]: the share of the last group's samples that solved the task."""
    change: Float64Array
    """float64 [N]: `mean` less that of the group before; 0 before the second group."""

    @classmethod
    def empty(cls, num_rows: int) -> "PromptOutcomes":
        """Return the outcomes of rows without groups."""
        zeros = np.zeros(num_rows)
        return cls(num_groups=np.zeros(num_rows, np.int64), mean=zeros, variance=zeros, success=zeros, change=zeros)

    def with_groups(self, groups: Iterable[tuple[int, Sequence[float], float]]) -> "PromptOutcomes":
        """Return the outcomes with further groups, in order: the row of each, its rewards, one at least, and its success."""
        columns = {field.name: getattr(self, field.name).copy() for field in fields(PromptOutcomes)}
        for row, rewards, success in groups:
            values, mean = np.asarray(rewards, np.float64), float(np.mean(rewards))
            columns["change"][row] = mean - columns["mean"][row] if columns["num_groups"][row] else 0.0
            columns["num_groups"][row] += 1
            columns["mean"][row], columns["success"][row] = mean, success
            columns["variance"][row] = np.square(values - mean).mean()
        return PromptOutcomes(**columns)

    def require(self, num_rows: int) -> None:
        """Raise CheckpointError where they are of another number of rows."""
        if len(self.num_groups) != num_rows:
            raise CheckpointError(
                f"the checkpoint knows of {len(self.num_groups)} prompts; expected {num_rows}, those of the data"
            )


PromptWeights: TypeAlias = Callable[[PromptOutcomes], Float64Array]
"""A function of this group: float64 [N], at least 0 and finite. Only ratios matter."""


def learnability(outcomes: PromptOutcomes) -> Float64Array:
    """float64 [N]: the variance of rewards, p(1 - p) for rewards of 0 and 1: the learnability of SFL (arXiv:2408.15099,
    equation 3) and LILO (arXiv:2502.12272)."""
    return outcomes.variance


def learning_progress(outcomes: PromptOutcomes) -> Float64Array:
    """float64 [N]: the magnitude of the change of the mean reward from one group to the next (absolute learning progress,
    arXiv:1707.00183, section 3). A row with one group weighs as its standard deviation does: nothing is known of its change."""
    return np.where(outcomes.num_groups > 1, np.abs(outcomes.change), np.sqrt(outcomes.variance))


def failure_rate(outcomes: PromptOutcomes) -> Float64Array:
    """float64 [N]: 1 - s with s the share of solved samples (prioritised sampling of Kimi k1.5, arXiv:2501.12599)."""
    return 1.0 - outcomes.success


def prompt_weights(name: str) -> PromptWeights:
    """Return the installed function of a name. PluginError where it is not installed or not usable."""
    state = named_state(functions(KIND, name=name), name)
    if state is None or not state.is_usable or state.entry.function is None:
        known = ", ".join(sorted(one.entry.name for one in functions(KIND) if one.is_usable))
        found = "not installed" if state is None else state.text
        raise PluginError(f"data.prompt_weights: {name!r} is {found}; expected one of {known}")
    return state.entry.function


def rates(weights: PromptWeights, outcomes: PromptOutcomes) -> Float64Array:
    """float64 [N], within UNIFORM_SHARE and 1: how often each row is taken when the order of the data comes to it.

    u + (1 - u) w_i / max w. Rows without a group, and all rows where no weight is above 0, have a rate of 1. PluginError for
    weights of another form.
    """
    found = np.asarray(weights(outcomes))
    seen = outcomes.num_groups > 0
    if found.shape != seen.shape or found.dtype != np.float64 or not np.isfinite(found).all() or (found < 0).any():
        expected = f"float64 [{len(seen)}], finite and at least 0"
        raise PluginError(f"data.prompt_weights: found {found.dtype} {list(found.shape)}, {found!r:.100}; expected {expected}")
    most = float(found[seen].max(initial=0.0))
    relative = np.where(seen, found / most, 1.0) if most > 0 else np.ones(len(seen))
    return UNIFORM_SHARE + (1 - UNIFORM_SHARE) * relative
