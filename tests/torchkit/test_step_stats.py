"""Reasons to refuse an optimizer step, and the statistics of an accepted one."""

import math

import numpy as np
import pytest

from rlcore.spi import BoundError, ContractError, NonFiniteError
from rlcore_torchkit.trainer.step_stats import StepStats, check_bounds, check_finite, check_state


def stats(loss=1.0, grad_norm=2.0, **metrics):
    return StepStats(loss=loss, grad_norm=grad_norm, metrics=metrics)


def test_the_result_holds_the_totals_and_what_the_request_asked_for():
    logprobs = (np.zeros(3, np.float32),)
    result = stats(entropy=0.5).result(weight_version=4, learning_rate=1e-3, logprobs=logprobs)
    assert (result.weight_version, result.loss, result.grad_norm, result.learning_rate) == (4, 1.0, 2.0, 1e-3)
    assert result.metrics == {"entropy": 0.5}
    assert result.logprobs is logprobs


def test_a_request_names_the_version_held():
    check_state("train_step", 3, 3, failed_midway=False)
    with pytest.raises(ContractError, match=r"get_logprobs: found weight_version 2; expected 3"):
        check_state("get_logprobs", 2, 3, failed_midway=False)


def test_gradients_of_a_step_that_failed_midway_let_no_other_hook_run():
    with pytest.raises(ContractError, match="export_weights: .* step failed"):
        check_state("export_weights", 3, 3, failed_midway=True)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("field", "text"),
    [("loss", "the loss is"), ("grad_norm", r"the gradient's norm is .* in lm_head.weight"), ("kl", "the metric kl is")],
)
def test_a_figure_that_is_not_finite_is_named(value, field, text):
    with pytest.raises(NonFiniteError, match=f"train_step at weight version 7: {text}"):
        check_finite(stats(**{field: value}), 7, lambda: ["lm_head.weight"])


def test_gradients_are_looked_through_only_where_their_norm_is_not_finite():
    """It costs a collective."""

    def look():
        raise AssertionError("nothing is wrong with the gradients")

    check_finite(stats(entropy=0.0), 0, look)
    with pytest.raises(NonFiniteError, match="the loss is nan"):
        check_finite(stats(loss=math.nan), 0, look)


def test_a_metric_above_its_bound_is_refused_and_reported():
    bounds = {"kl": 0.5, "entropy": 3.0, "absent": 0.0}
    check_bounds(stats(kl=0.5, entropy=-9.0, unbound=1e9), bounds, 2)
    with pytest.raises(BoundError, match="version 2: .* kl is 0.75, above 0.5; ") as raised:
        check_bounds(stats(kl=0.75, entropy=1.0), bounds, 2)
    assert raised.value.metrics == {"kl": 0.75}
    with pytest.raises(BoundError) as raised:
        check_bounds(stats(kl=1.0, entropy=4.0), bounds, 2)
    assert raised.value.metrics == {"kl": 1.0, "entropy": 4.0}
