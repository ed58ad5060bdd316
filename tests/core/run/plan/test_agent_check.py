"""Each way of treating a history is accepted where no agent runs the episodes."""

from collections.abc import Callable

import pytest

from rlcore.run.plan.run_plan import RunPlan

Prepare = Callable[..., RunPlan]


@pytest.mark.parametrize("history", ["segment", "refuse", "keep_sampled"])
def test_a_history_is_treated_as_the_recipe_says(prepared: Prepare, history: str) -> None:
    assert prepared(f'rollout.history="{history}"').recipe.rollout.history == history


def test_by_default_it_goes_on_in_a_segment(prepared: Prepare) -> None:
    assert prepared().recipe.rollout.history == "segment"
