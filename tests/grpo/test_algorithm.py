"""The driver's side: what is asked of the loop, the batch that is built, and the options that are refused."""

import importlib
import math
import pickle
import subprocess
import sys

import numpy as np
import pytest
from attrs import evolve

from rlcore.schema.structure import structure
from rlcore.spi import (
    ADVANTAGES,
    EPISODE_IDS,
    GENERATION_LOGPROBS,
    GROUP_IDS,
    REFERENCE_LOGPROBS,
    WEIGHT_VERSIONS,
    AlgorithmNeeds,
    TurnRewards,
)
from rlcore_grpo.algorithm import Grpo
from rlcore_grpo.config import GrpoConfig
from rlcore_grpo.provider import PROVIDER

from .grpo_rollouts import make_grpo, make_rollouts


@pytest.mark.parametrize(
    ("previous", "updates", "exact", "needed"),
    [
        ("auto", 1, False, True),
        ("auto", 4, False, True),
        ("auto", 4, True, False),
        ("trainer", 1, True, True),
        ("trainer", 4, True, True),
        ("generation", 4, False, False),
    ],
)
def test_previous_logprobs_are_needed_where_the_generators_do_not_stand_for_them(previous, updates, exact, needed):
    grpo = make_grpo(GrpoConfig(previous_logprobs=previous), minibatches_per_step=updates, exact=exact)
    expected = AlgorithmNeeds(
        source="rollouts",
        previous_logprobs=needed,
        reference_logprobs=False,
        entropy=True,
        min_samples_per_prompt=2,
        untruncated_sampling=True,
        corrects_staleness=True,
    )
    assert grpo.needs == expected
    assert grpo.config.previous_logprobs == {"auto": "generation" if exact else "trainer"}.get(previous, previous)


@pytest.mark.parametrize(
    ("options", "compares"),
    [
        ({}, "rewards"),
        ({"advantage_per": "turn"}, "turn_rewards"),
        ({"advantage_per": "process"}, "turn_rewards"),
        ({"reward_aggregation": "normalise_then_sum"}, "reward_components"),
    ],
)
def test_the_loop_is_told_what_tells_samples_apart(options, compares):
    assert make_grpo(GrpoConfig(**options)).needs.compares == compares


def test_reference_and_entropy_are_asked_for_only_where_used():
    rollouts = make_rollouts([0, 1], [0, 0])
    plain, full = make_grpo(), make_grpo(GrpoConfig(kl_coefficient=0.1, entropy_coefficient=0.01))
    assert plain.build_batch(rollouts).loss.token_columns == (ADVANTAGES, GENERATION_LOGPROBS)
    assert plain.build_batch(rollouts).loss.entropy == "metric"
    assert full.needs.reference_logprobs
    assert full.build_batch(rollouts).loss.token_columns == (ADVANTAGES, GENERATION_LOGPROBS, REFERENCE_LOGPROBS)
    assert full.build_batch(rollouts).loss.entropy == "loss"
    assert make_grpo(GrpoConfig(entropy_metric="estimate")).build_batch(rollouts).loss.entropy == "none"
    assert not make_grpo(GrpoConfig(entropy_metric="estimate")).needs.entropy


def test_each_loss_token_gets_its_samples_advantage_and_other_columns_stay():
    rollouts = make_rollouts([1, 0, 0, 0, 1, 1], [0, 0, 0, 3, 3, 3])
    training = make_grpo(GrpoConfig(advantage_normalisation="none")).build_batch(rollouts)
    expected = np.float32([2 / 3, -1 / 3, -1 / 3, -2 / 3, 1 / 3, 1 / 3])
    column = training.batch.token_columns[ADVANTAGES]
    assert column.dtype == np.float32
    np.testing.assert_allclose(column.reshape(6, 5), np.outer(expected, [0, 0, 1, 1, 1]), rtol=1e-6)
    assert training.no_signal is None
    assert training.metrics == pytest.approx({"advantage_max": 2 / 3, "zero_advantage_groups": 0.0})
    assert set(training.batch.token_columns) == {ADVANTAGES, GENERATION_LOGPROBS, WEIGHT_VERSIONS}
    assert set(training.batch.sequence_columns) == {"anything", GROUP_IDS}
    assert ADVANTAGES not in rollouts.batch.token_columns


def test_each_turn_gets_its_own_advantage_where_the_recipe_says_so():
    """Here the first turn tells the samples apart and the second does not; a masked sample is in neither's baseline."""
    rollouts = make_rollouts([1, 0, 5], [0, 0, 0], valid=[True, True, False])
    turn_of = np.tile(np.array([-1, 0, -1, 1, 1], np.int32), 3)
    batch = evolve(rollouts.batch, loss_mask=(turn_of >= 0) & np.repeat(rollouts.valid, 5))
    turns = TurnRewards(rewards=np.array([1, 0, 0, 0, 4, 1], np.float32), offsets=np.array([0, 2, 4, 6]), turn_of=turn_of)
    rollouts = evolve(rollouts, batch=batch, turns=turns)
    training = make_grpo(GrpoConfig(advantage_per="turn", advantage_normalisation="none")).build_batch(rollouts)
    found = training.batch.token_columns[ADVANTAGES].reshape(3, 5)
    np.testing.assert_allclose(found, [[0, 0.5, 0, 0, 0], [0, -0.5, 0, 0, 0], [0, 0, 0, 0, 0]])
    assert training.has_signal.tolist() == [True, True, False]
    assert training.no_signal is None
    whole = make_grpo(GrpoConfig(advantage_normalisation="none")).build_batch(rollouts).batch.token_columns[ADVANTAGES]
    np.testing.assert_allclose(whole.reshape(3, 5), [[0, 0.5, 0, 0.5, 0.5], [0, -0.5, 0, -0.5, -0.5], [0, 0, 0, 0, 0]])


def test_process_supervision_gives_each_turn_the_normalised_rewards_from_it_on():
    """The mean of the rewards 1, 0, 0 and 0 is 1/4; a masked sample is not in it."""
    rollouts = make_rollouts([1, 0, 5], [0, 0, 0], valid=[True, True, False])
    turn_of = np.tile(np.array([-1, 0, -1, 1, 1], np.int32), 3)
    batch = evolve(rollouts.batch, loss_mask=(turn_of >= 0) & np.repeat(rollouts.valid, 5))
    turns = TurnRewards(rewards=np.array([1, 0, 0, 0, 4, 1], np.float32), offsets=np.array([0, 2, 4, 6]), turn_of=turn_of)
    config = GrpoConfig(advantage_per="process", advantage_normalisation="none")
    training = make_grpo(config).build_batch(evolve(rollouts, batch=batch, turns=turns))
    found = training.batch.token_columns[ADVANTAGES].reshape(3, 5)
    np.testing.assert_allclose(found, [[0, 0.5, 0, -0.25, -0.25], [0, -0.5, 0, -0.25, -0.25], [0, 0, 0, 0, 0]])
    assert training.has_signal.tolist() == [True, True, False]
    assert training.no_signal is None


def test_invalid_samples_get_no_advantage_and_do_not_touch_their_group():
    whole = make_rollouts([1, 0, 0, 0], [0, 0, 0, 0], valid=[True, True, True, False])
    alone = make_rollouts([1, 0, 0], [0, 0, 0])
    found = make_grpo().build_batch(whole).batch.token_columns[ADVANTAGES].reshape(4, 5)
    np.testing.assert_array_equal(found[:3], make_grpo().build_batch(alone).batch.token_columns[ADVANTAGES].reshape(3, 5))
    assert not found[3].any()


def test_equal_rewards_are_no_signal_unless_another_term_has_one():
    equal = make_rollouts([1, 1, 0, 0], [0, 0, 1, 1])
    training = make_grpo().build_batch(equal)
    assert training.no_signal == "the rewards of each of the 2 groups are all equal"
    assert training.metrics == {"advantage_max": 0.0, "zero_advantage_groups": 1.0}
    for config in (GrpoConfig(kl_coefficient=0.1), GrpoConfig(entropy_coefficient=0.1)):
        assert make_grpo(config).build_batch(equal).no_signal is None
    mixed = make_rollouts([1, 1, 0, 1], [0, 0, 1, 1])
    assert make_grpo().build_batch(mixed).no_signal is None
    assert make_grpo().build_batch(mixed).metrics["zero_advantage_groups"] == 0.5


def test_a_step_without_valid_samples_is_no_signal():
    for config in (GrpoConfig(), GrpoConfig(kl_coefficient=0.1)):
        training = make_grpo(config).build_batch(make_rollouts([0, 0], [0, 0], valid=[False, False]))
        assert training.no_signal == "no sample has a token to train on"


def test_advantages_of_many_rollouts_match_those_of_each_group_alone():
    random = np.random.default_rng(0)
    rewards, ids = random.random(65_536), np.repeat(np.arange(8_192), 8)
    found = make_grpo().build_batch(make_rollouts(rewards, ids)).batch.token_columns[ADVANTAGES].reshape(-1, 5)[:, -1]
    table = np.float32(rewards).astype(np.float64).reshape(-1, 8)
    expected = (table - table.mean(1, keepdims=True)) / (table.std(1, ddof=1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(found.reshape(-1, 8), expected, rtol=1e-5, atol=1e-6)


def test_the_loss_travels_by_path_and_picklable_config():
    loss = make_grpo(exact=True).build_batch(make_rollouts([0, 1], [0, 0])).loss
    module, function = loss.path.split(":")
    assert callable(getattr(importlib.import_module(module), function))
    assert pickle.loads(pickle.dumps(loss)) == loss
    assert loss.config.previous_logprobs == "generation"


def test_the_provider_imports_nothing_heavy_and_names_what_exists():
    code = "import sys, rlcore_grpo.provider; print({'torch', 'transformers'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"
    module, name = PROVIDER.backend.split(":")
    assert getattr(importlib.import_module(module), name) is Grpo


@pytest.mark.parametrize(
    "wrong",
    [
        {"clip_low": 1.1},
        {"clip_low": -0.1},
        {"clip_high": -1.0},
        {"dual_clip": 1.0},
        {"kl_coefficient": -1.0},
        {"importance_maximum": 0.0},
        {"entropy_coefficient": -1.0},
        {"constant_length": 0},
    ],
)
def test_options_out_of_range_are_refused(wrong):
    _, (problem,) = structure(wrong, GrpoConfig, "algorithm.grpo")
    assert problem.path == f"algorithm.grpo.{next(iter(wrong))}"


def test_what_never_clips_or_truncates_can_be_said():
    assert structure({"clip_high": math.inf, "importance_maximum": math.inf}, GrpoConfig, "algorithm.grpo")[1] == []


def test_an_episode_of_several_sequences_counts_once_in_its_group():
    """Rewards 1, 0, 0, of which the first episode has two sequences: the advantages are those of three samples."""
    alone = make_grpo().build_batch(make_rollouts([1, 0, 0], [0, 0, 0]))
    rollouts = make_rollouts([1, 1, 0, 0], [0, 0, 0, 0])
    columns = {**rollouts.batch.sequence_columns, EPISODE_IDS: np.array([0, 0, 1, 2], np.int32)}
    several = make_grpo().build_batch(evolve(rollouts, batch=evolve(rollouts.batch, sequence_columns=columns)))
    expected = alone.batch.token_columns[ADVANTAGES].reshape(3, -1)
    found = several.batch.token_columns[ADVANTAGES].reshape(4, -1)
    np.testing.assert_array_equal(found, expected[[0, 0, 1, 2]])
    assert several.has_signal.tolist() == [True] * 4
