"""Options of advantages that do not go together."""

import itertools
import typing

import attrs
import pytest
from attrs import evolve

from rlcore.spi import CheckContext, ModelSpec, Note
from rlcore_grpo.check import check
from rlcore_grpo.config import GrpoConfig
from rlcore_grpo.presets import DapoConfig, ReinforcePpConfig

CONTEXT = CheckContext(model=ModelSpec(path="model"), device="cpu", world_size=1, max_sequence_length=8, max_turns=2)
PARTS = "normalise_then_sum"


def test_turns_are_compared_where_there_are_several():
    (problem,) = check(evolve(CONTEXT, max_turns=1), GrpoConfig(advantage_per="turn"))
    assert problem.path == "algorithm.grpo.advantage_per"
    assert "turn" in problem.found
    assert not check(CONTEXT, GrpoConfig(advantage_per="turn"))


def test_parts_of_one_turn_may_be_compared():
    (note,) = check(evolve(CONTEXT, max_turns=1), GrpoConfig(advantage_per="process"))
    assert isinstance(note, Note)
    assert note.path == "algorithm.grpo.advantage_per"
    assert not check(CONTEXT, GrpoConfig(advantage_per="process"))


@pytest.mark.parametrize(
    ("key", "options"),
    [
        ("advantage_normalisation", {"advantage_baseline": "none", "advantage_normalisation": "std"}),
        ("advantage_normalisation", {"advantage_baseline": "none", "advantage_normalisation": "batch_std"}),
        ("advantage_normalisation", {"advantage_baseline": "batch_mean", "advantage_normalisation": "leave_one_out_std"}),
        ("advantage_normalisation", {"advantage_baseline": "leave_one_out", "advantage_normalisation": "mean"}),
        ("advantage_normalisation", {"reward_aggregation": PARTS, "advantage_normalisation": "batch_whitening"}),
        ("length_penalty", {"advantage_normalisation": "mean", "length_penalty": "linear"}),
        ("length_penalty", {"advantage_per": "turn", "length_penalty": "group"}),
        ("length_penalty_weight", {"length_penalty_weight": 2.0}),
        ("length_penalty_buffer", {"length_penalty": "linear", "length_penalty_buffer": 0.5}),
        ("kl_placement", {"kl_placement": "reward"}),
        ("kl_placement", {"kl_placement": "reward", "kl_coefficient": 0.1}),
        ("kl_placement", {"kl_placement": "reward", "kl_coefficient": 0.1, "advantage_normalisation": "batch_whitening"}),
        ("kl_placement", {"kl_placement": "reward_to_go", "kl_coefficient": 0.1, "advantage_per": "turn"}),
        ("kl_placement", {"kl_placement": "reward", "kl_coefficient": 0.1, "reward_aggregation": PARTS}),
        ("kl_placement", {"kl_placement": "reward_to_go", "kl_coefficient": 0.1, "ratio": "sequence"}),
        ("kl_gradient", {"kl_placement": "reward_to_go", "kl_coefficient": 0.1, "kl_gradient": "estimate"}),
        ("length_penalty", {"advantage_per": "process", "length_penalty": "group"}),
        ("advantage_normalisation", {"advantage_per": "process", "advantage_normalisation": "sample_whitening"}),
        ("reward_aggregation", {"advantage_per": "turn", "reward_aggregation": PARTS}),
        ("advantage_normalisation", {"advantage_per": "turn", "advantage_normalisation": "sample_whitening"}),
        ("reward_weights", {"reward_weights": {"answer": 2.0}}),
    ],
)
def test_what_does_not_go_together_is_refused(key, options):
    (problem,) = check(CONTEXT, GrpoConfig(**options))
    assert problem.path == f"algorithm.grpo.{key}"


def test_every_baseline_goes_with_some_normalisation_and_every_normalisation_with_some_baseline():
    fields = attrs.fields_dict(GrpoConfig)
    baselines, normalisations = (
        typing.get_args(fields[name].type) for name in ("advantage_baseline", "advantage_normalisation")
    )
    fitting = [
        (baseline, normalisation)
        for baseline, normalisation in itertools.product(baselines, normalisations)
        if not check(CONTEXT, GrpoConfig(advantage_baseline=baseline, advantage_normalisation=normalisation))
    ]
    assert {baseline for baseline, _ in fitting} == set(baselines)
    assert {normalisation for _, normalisation in fitting} == set(normalisations)


def test_what_a_preset_sets_is_no_problem_once_it_is_turned_off():
    assert not check(CONTEXT, ReinforcePpConfig(kl_coefficient=0.0))
    assert not check(CONTEXT, DapoConfig(length_penalty="none"))
