"""Ranges of the options of advantages."""

import math

import pytest

from rlcore.schema.structure import structure
from rlcore_grpo.config import AdvantageConfig, GrpoConfig


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ({"advantage_epsilon": -1.0}, "advantage_epsilon"),
        ({"advantage_baseline": "mean"}, "advantage_baseline"),
        ({"length_penalty_weight": 0.0}, "length_penalty_weight"),
        ({"length_penalty_buffer": 1.5}, "length_penalty_buffer"),
        ({"reward_weights": {"a": math.inf}}, "reward_weights.a"),
    ],
)
def test_options_out_of_range_are_refused(options, path):
    _, (problem,) = structure(options, AdvantageConfig, "algorithm.grpo")
    assert problem.path == f"algorithm.grpo.{path}"


def test_weights_of_components_may_be_negative():
    assert structure({"reward_weights": {"a": 2, "b": -0.5}}, GrpoConfig, "algorithm.grpo")[1] == []


@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out", "batch_mean", "none"])
def test_groups_are_compared_by_their_own_baselines(baseline):
    assert AdvantageConfig(advantage_baseline=baseline).compares_groups == (baseline in ("group_mean", "leave_one_out"))
