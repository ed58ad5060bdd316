"""Rewards with what is added for their length and taken off for the KL divergence, through to the advantages of tokens."""

import itertools
import math

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from rlcore.spi import EPISODE_IDS, GENERATION_LOGPROBS, REFERENCE_LOGPROBS, RewardError, TokenBatch
from rlcore_grpo.config import GrpoConfig
from rlcore_grpo.presets import GdpoConfig, MaxRlConfig, ReinforcePpConfig
from rlcore_grpo.shaped_rewards import longest_answers

from .grpo_rollouts import advantages_of, make_grpo, make_rollouts, of_lengths

REWARDS, GROUPS, RESPONSES = [1.0, 0.0, 1.0, 0.5], [0, 0, 1, 1], [2, 5, 10, 9]
PLAIN = {"advantage_normalisation": "none"}


def sequences(rollouts):
    """The loss tokens of each sequence, by number."""
    offsets, mask = rollouts.batch.offsets, rollouts.batch.loss_mask
    return [np.flatnonzero(mask[a:b]) + a for a, b in itertools.pairwise(offsets)]


def k1_of(rollouts):
    """log policy - log reference of every token, in float64."""
    columns = rollouts.batch.token_columns
    return np.float64(columns[GENERATION_LOGPROBS]) - np.float64(columns[REFERENCE_LOGPROBS])


def with_episodes(rollouts, ids):
    """The rollouts as episodes of agents, each sequence of the episode in `ids`."""
    columns = {**rollouts.batch.sequence_columns, EPISODE_IDS: np.array(ids, np.int32)}
    return evolve(rollouts, batch=evolve(rollouts.batch, sequence_columns=columns))


def of_samples(advantages, rollouts):
    """The one advantage of each sample's tokens."""
    found = [advantages[piece] for piece in sequences(rollouts)]
    assert all((values == values[0]).all() for values in found)
    assert not advantages[~rollouts.batch.loss_mask].any()
    return [float(values[0]) for values in found]


@pytest.mark.parametrize(
    ("kind", "penalties"),
    [
        ("soft_overlong", [0.0, 0.0, -1.0, -0.5]),  # of at most 10 tokens the last 2
        ("linear", [-0.2, -0.5, -1.0, -0.9]),
        ("group", [0.5, -0.5, -0.5, 0.5]),
    ],
)
def test_penalties_are_added_to_rewards_before_these_are_compared(kind, penalties):
    rollouts = of_lengths(REWARDS, GROUPS, RESPONSES)
    config = GrpoConfig(length_penalty=kind, length_penalty_weight=0.1, **PLAIN)
    shaped = np.array(REWARDS) + 0.1 * np.array(penalties)
    expected = shaped - np.repeat(shaped.reshape(2, 2).mean(1), 2)
    assert of_samples(advantages_of(config, rollouts), rollouts) == pytest.approx(expected.tolist(), abs=1e-6)
    metrics = make_grpo(config).build_batch(rollouts).metrics
    assert metrics["length_penalty"] == pytest.approx(0.1 * np.mean(penalties))


@pytest.mark.parametrize(
    ("kind", "penalties"),
    [
        ("soft_overlong", (0.0, -0.5)),  # the longest answers have 3 and 9 tokens, of at most 10 the last 2
        ("linear", (-0.3, -0.9)),
        ("group", (0.5, -0.5)),  # all answers have 5 and 9
    ],
)
def test_an_agents_answers_are_bounded_one_by_one_and_compared_together(kind, penalties):
    rollouts = with_episodes(of_lengths([1, 1, 1], [0, 0, 0], [2, 3, 9]), [0, 0, 1])
    found = of_samples(advantages_of(GrpoConfig(length_penalty=kind, **PLAIN), rollouts), rollouts)
    half = (penalties[0] - penalties[1]) / 2
    assert found == pytest.approx([half, half, -half])


MASK = st.lists(st.booleans(), max_size=6).map(lambda said: [False, *said])


@given(st.lists(st.lists(MASK, min_size=1, max_size=3), min_size=1, max_size=4))
def test_the_longest_answer_of_an_episode_is_what_counting_finds(episodes):
    masks = [mask for episode in episodes for mask in episode]
    ids = [number for number, episode in enumerate(episodes) for _ in episode]
    made = make_rollouts([0.0] * len(masks), [0] * len(masks))
    batch = TokenBatch(
        tokens=np.zeros(sum(map(len, masks)), np.int32),
        offsets=np.cumsum([0, *map(len, masks)]),
        loss_mask=np.concatenate(masks),
        sequence_columns=made.batch.sequence_columns,
    )
    longest = [
        max((len(list(run)) for mask in episode for said, run in itertools.groupby(mask) if said), default=0)
        for episode in episodes
    ]
    assert longest_answers(with_episodes(evolve(made, batch=batch), ids)).tolist() == longest


def test_two_turns_of_an_environment_share_one_limit():
    rollouts = of_lengths([1, 1], [0, 0], [5, 9])
    mask = rollouts.batch.loss_mask.copy()
    mask[3] = False
    rollouts = evolve(rollouts, batch=evolve(rollouts.batch, loss_mask=mask))
    found = advantages_of(GrpoConfig(length_penalty="linear", **PLAIN), rollouts)[mask]
    assert (found[0], found[-1]) == pytest.approx((0.25, -0.25))  # 4 and 9 of 10


def test_the_kl_divergence_of_an_episode_is_taken_off_its_reward():
    """RLOO (arXiv:2402.14740), section 2.1: R = r - β log(policy / reference), of the whole answer."""
    rollouts = of_lengths(REWARDS, GROUPS, RESPONSES)
    config = GrpoConfig(
        kl_coefficient=0.2, kl_estimator="k1", kl_placement="reward", advantage_baseline="leave_one_out", **PLAIN
    )
    shaped = [
        reward - 0.2 * math.fsum(k1_of(rollouts)[piece]) for reward, piece in zip(REWARDS, sequences(rollouts), strict=True)
    ]
    expected = [shaped[0] - shaped[1], shaped[1] - shaped[0], shaped[2] - shaped[3], shaped[3] - shaped[2]]
    assert of_samples(advantages_of(config, rollouts), rollouts) == pytest.approx(expected, rel=1e-5)


def test_reinforce_pp_whitens_rewards_less_the_kl_divergence_to_go():
    """REINFORCE++ (arXiv:2501.03262): A_t = r - β Σ_{i≥t} log(policy / reference), whitened over the tokens of the step."""
    rollouts = of_lengths(REWARDS, GROUPS, RESPONSES)
    kl = k1_of(rollouts)
    values = np.array(
        [
            reward - 1e-3 * math.fsum(kl[piece[place:]])
            for reward, piece in zip(REWARDS, sequences(rollouts), strict=True)
            for place in range(len(piece))
        ]
    )
    expected = (values - values.mean()) / (values.std(ddof=1) + 1e-6)
    training = make_grpo(ReinforcePpConfig()).build_batch(rollouts)
    found = training.batch.token_columns["advantages"]
    np.testing.assert_allclose(found[rollouts.batch.loss_mask], expected, rtol=1e-4, atol=1e-6)
    assert not found[~rollouts.batch.loss_mask].any()
    assert training.metrics["reward_kl"] == pytest.approx(kl[rollouts.batch.loss_mask].mean(), rel=1e-5)
    assert training.metrics["advantage_max"] == pytest.approx(np.abs(expected).max(), rel=1e-4)


def test_where_all_rewards_are_equal_the_divergence_alone_is_not_whitened():
    """The policy is the reference at first, and what is left of their difference is roundings."""
    rollouts = of_lengths([0.5] * 4, GROUPS, RESPONSES)
    training = make_grpo(ReinforcePpConfig()).build_batch(rollouts)
    assert training.no_signal is not None
    assert not training.has_signal.any()
    plain = GrpoConfig(kl_placement="reward_to_go", kl_coefficient=0.1, kl_estimator="k1", advantage_normalisation="none")
    to_go = make_grpo(plain).build_batch(rollouts)
    assert to_go.no_signal is None
    last = [piece[-1] for piece in sequences(rollouts)]
    np.testing.assert_allclose(to_go.batch.token_columns["advantages"][last], -0.1 * k1_of(rollouts)[last], rtol=1e-5)


def test_a_divergence_in_rewards_is_asked_for_before_and_not_read_by_the_loss():
    grpo = make_grpo(ReinforcePpConfig())
    assert grpo.needs.reference_logprobs
    assert grpo.needs.reference_logprobs_in_rollouts
    assert grpo.needs.min_samples_per_prompt == 1
    loss = grpo.build_batch(of_lengths(REWARDS, GROUPS, RESPONSES)).loss
    assert REFERENCE_LOGPROBS not in loss.token_columns
    assert loss.config.kl_coefficient == 0.0
    in_loss = make_grpo(GrpoConfig(kl_coefficient=0.1))
    assert not in_loss.needs.reference_logprobs_in_rollouts


def test_whitening_is_of_the_tokens_of_valid_samples():
    rollouts = make_rollouts([3, 0, 0, 9], [0, 0, 1, 1], valid=[True, True, True, False])
    found = advantages_of(GrpoConfig(advantage_baseline="none", advantage_normalisation="batch_whitening"), rollouts)
    tokens = np.repeat([3.0, 0.0, 0.0], 3)
    expected = (tokens - 1.0) / (tokens.std(ddof=1) + 1e-6)
    np.testing.assert_allclose(found[rollouts.batch.loss_mask], expected, rtol=1e-6)
    assert not found.reshape(4, 5)[3].any()


@pytest.mark.parametrize(("baseline", "needed"), [("none", 1), ("batch_mean", 1), ("group_mean", 2), ("leave_one_out", 2)])
def test_groups_of_one_are_enough_where_no_group_is_compared(baseline, needed):
    grpo = make_grpo(GrpoConfig(advantage_baseline=baseline, **PLAIN))
    assert grpo.needs.min_samples_per_prompt == needed
    training = grpo.build_batch(make_rollouts([0, 0], [0, 1]))
    assert training.no_signal is not None
    assert training.has_signal.tolist() == [False, False]


def with_parts(rollouts, **parts):
    return evolve(rollouts, reward_components={name: np.array(values, np.float32) for name, values in parts.items()})


@pytest.mark.parametrize(
    ("options", "expected"), [({}, [1 / 3**0.5, -2 / 3**0.5, 1 / 3**0.5]), ({"reward_weights": {"a": 2.0}}, [1.0, -1.0, 0.0])]
)
def test_components_are_compared_one_by_one_among_valid_samples(options, expected):
    """Normalised they are (2, -1, -1)/√3 and (-1, -1, 2)/√3."""
    rollouts = make_rollouts([1, 2, 3, 0], [0, 0, 0, 0], valid=[True, True, True, False])
    rollouts = with_parts(rollouts, a=[1, 0, 0, 9], b=[0, 0, 3, 9])
    found = advantages_of(GdpoConfig(**options), rollouts).reshape(4, 5)[:, -1]
    np.testing.assert_allclose(found, [*expected, 0.0], rtol=1e-5, atol=1e-6)


def test_the_length_is_a_component_of_its_own():
    rollouts = with_parts(of_lengths([0, 0], [0, 0], [2, 8]), a=[0, 0])
    found = of_samples(advantages_of(GdpoConfig(length_penalty="linear"), rollouts), rollouts)
    assert found == pytest.approx([2**-0.5, -(2**-0.5)], rel=1e-5)


@pytest.mark.parametrize(
    ("parts", "options", "named"),
    [({}, {}, "no reward components"), ({"a": [0, 1]}, {"reward_weights": {"b": 1.0}}, "reward_weights: b")],
)
def test_components_that_are_missing_are_an_error(parts, options, named):
    rollouts = make_rollouts([0, 1], [0, 0])
    with pytest.raises(RewardError, match=named):
        make_grpo(GdpoConfig(**options)).build_batch(with_parts(rollouts, **parts))
    masked = make_rollouts([0, 1], [0, 0], valid=[False, False])
    assert make_grpo(GdpoConfig(**options)).build_batch(with_parts(masked, **parts)).no_signal is not None


def test_negative_rewards_are_not_divided_by_their_mean():
    with pytest.raises(RewardError, match="at least 0"):
        make_grpo(MaxRlConfig()).build_batch(make_rollouts([-1, 1], [0, 0]))
    found = advantages_of(MaxRlConfig(), make_rollouts([0, 1, 0, 0], [0, 0, 0, 0])).reshape(4, 5)[:, -1]
    np.testing.assert_allclose(found, [-1, 3, -1, -1], rtol=1e-4)
