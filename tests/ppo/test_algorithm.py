"""What the policy and the critic are trained on, against the definition, episode by episode in plain Python."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.spi import ADVANTAGES, GENERATION_LOGPROBS, REFERENCE_LOGPROBS, VALUES
from rlcore_ppo.loss import RETURNS
from rlcore_torchkit.rl.episodes import EPISODE_TOKENS
from rlcore_torchkit.rl.shaping import LIKELIHOOD_WEIGHTS

from .ppo_rollouts import make_ppo, make_rollouts

RAW = {"advantage_normalisation": "none"}


def advantages_of(values, rewards, last, gamma, gae_lambda):
    """Σ_l (γλ)^l δ_{k+l} (arXiv:1506.02438, equation 16), of one episode's steps."""
    following = [*values[1:], last]
    deltas = [r + gamma * v_next - v for r, v, v_next in zip(rewards, values, following, strict=True)]
    return [sum((gamma * gae_lambda) ** (j - k) * deltas[j] for j in range(k, len(deltas))) for k in range(len(deltas))]


def columns(training):
    found = training.batch.token_columns
    return found[ADVANTAGES], found[RETURNS]


def test_environment_tokens_are_no_steps_and_values_are_those_before_a_token():
    """Two turns with the environment's words between: the state before the second turn's first token is the one that the
    critic told after the environment's last word."""
    rollouts = make_rollouts([[0, 0, 1, 1, 0, 0, 1], [0, 1]], [2.0, -1.0])
    told = rollouts.batch.token_columns[VALUES].astype(np.float64)
    ppo = make_ppo(gamma=0.9, gae_lambda=0.5, **RAW)
    advantages, returns = columns(ppo.build_batch(rollouts))
    first = advantages_of([told[1], told[2], told[5]], [0, 0, 2.0], 0.0, 0.9, 0.5)
    second = advantages_of([told[7]], [-1.0], 0.0, 0.9, 0.5)
    np.testing.assert_allclose(advantages, [0, 0, first[0], first[1], 0, 0, first[2], 0, second[0]], rtol=1e-6)
    values = np.array([told[1], told[2], told[5]])
    np.testing.assert_allclose(returns[[2, 3, 6]], np.array(first) + values, rtol=1e-6)
    assert not returns[[0, 1, 4, 5, 7]].any()


@settings(max_examples=40)
@given(st.data())
def test_turns_pay_at_their_last_tokens(data):
    """Also a turn without a token to train on, whose reward is not lost."""
    turns = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=4).filter(any))
    paid = data.draw(st.lists(st.sampled_from([-1.0, 0.5, 2.0]), min_size=len(turns), max_size=len(turns)))
    mask, turn_of = [0], [-1]
    for number, length in enumerate(turns):
        mask += [1] * length + [0]
        turn_of += [number] * length + [-1]
    rollouts = make_rollouts(
        [mask, [0, 1]], [sum(paid), 1.0], turns=([*turn_of, -1, 0], [*paid, 1.0], [0, len(turns), len(turns) + 1])
    )
    steps = [number for number, length in enumerate(turns) for _ in range(length)]
    rewards = [0.0] * len(steps)
    for number, reward in enumerate(paid):
        before = [k for k, of in enumerate(steps) if of <= number]
        rewards[before[-1] if before else 0] += reward
    told = rollouts.batch.token_columns[VALUES].astype(np.float64)
    places = np.flatnonzero(mask)
    expected = advantages_of(list(told[places - 1]), rewards, 0.0, 1.0, 0.95)
    advantages, _ = columns(make_ppo(**RAW).build_batch(rollouts))
    np.testing.assert_allclose(advantages[places], expected, rtol=1e-5, atol=1e-6)


def test_an_episode_in_two_sequences_is_one_chain_and_a_masked_one_has_no_step():
    rollouts = make_rollouts(
        [[0, 1, 1], [0, 0, 1], [0, 0, 0]], [3.0, 3.0, 0.0], episode_ids=[0, 0, 1], valid=[True, True, False]
    )
    told = rollouts.batch.token_columns[VALUES].astype(np.float64)
    advantages, _ = columns(make_ppo(gae_lambda=0.7, **RAW).build_batch(rollouts))
    expected = advantages_of([told[0], told[1], told[4]], [0, 0, 3.0], 0.0, 1.0, 0.7)
    np.testing.assert_allclose(advantages[[1, 2, 5]], expected, rtol=1e-6)
    assert not advantages[6:].any()


@pytest.mark.parametrize("turns", [None, ([-1, 0, 0, -1, 1, 1, -1, 0, -1, 1], [0.5, 2.0, 1.0, -1.0], [0, 2, 4])])
@pytest.mark.parametrize("options", [{}, {"kl_coefficient": 0.3, "gae_lambda": 0.7}])
def test_an_artificial_cut_changes_no_advantage_and_no_return(turns, options):
    whole = make_rollouts([[0, 1, 1, 0, 1, 1], [0, 1, 0, 1]], [2.5, 0.0], episode_ids=[0, 1], turns=turns)
    cut = make_rollouts([[0, 1, 1], [0, 1, 1], [0, 1], [0, 1]], [2.5, 2.5, 0.0, 0.0], episode_ids=[0, 0, 1, 1], turns=turns)
    uncut, segments = (make_ppo(**RAW, **options).build_batch(one) for one in (whole, cut))
    for found, expected in zip(columns(segments), columns(uncut), strict=True):
        np.testing.assert_array_equal(found, expected)
    assert segments.batch.counts() == uncut.batch.counts()
    assert segments.batch.sequence_columns[EPISODE_TOKENS].tolist() == [4, 4, 2, 2]


@pytest.mark.parametrize("limit", ["cut", "stopped"])
@pytest.mark.parametrize("bootstrap", [False, True])
def test_an_answer_that_was_cut_off_is_worth_0_behind_its_end_or_what_the_critic_says(bootstrap, limit):
    rollouts = make_rollouts([[0, 1, 1], [0, 1, 1]], [1.0, 1.0], **{limit: (1,)})
    told = rollouts.batch.token_columns[VALUES].astype(np.float64)
    advantages, _ = columns(make_ppo(bootstrap_truncated=bootstrap, **RAW).build_batch(rollouts))
    finished = advantages_of([told[0], told[1]], [0, 1.0], 0.0, 1.0, 0.95)
    cut = advantages_of([told[3], told[4]], [0, 1.0], told[5] if bootstrap else 0.0, 1.0, 0.95)
    np.testing.assert_allclose(advantages[[1, 2, 4, 5]], [*finished, *cut], rtol=1e-5)


def test_the_divergence_is_taken_off_each_tokens_reward():
    rollouts = make_rollouts([[0, 1, 1], [0, 1]], [1.0, 0.0])
    ppo = make_ppo(kl_coefficient=0.3, gae_lambda=1.0, **RAW)
    assert ppo.needs.reference_logprobs_in_rollouts
    training = ppo.build_batch(rollouts)
    held = {name: column.astype(np.float64) for name, column in rollouts.batch.token_columns.items()}
    kl = held[GENERATION_LOGPROBS] - held[REFERENCE_LOGPROBS]
    _, returns = columns(training)
    np.testing.assert_allclose(returns[[1, 2, 4]], [1 - 0.3 * (kl[1] + kl[2]), 1 - 0.3 * kl[2], -0.3 * kl[4]], rtol=1e-5)
    assert training.metrics["reward_kl"] == pytest.approx(kl[[1, 2, 4]].mean(), rel=1e-5)


def test_advantages_are_whitened_over_tokens_and_returns_are_not():
    rollouts = make_rollouts([[0, 1, 1], [0, 1]], [1.0, 0.0])
    raw, returns = columns(make_ppo(**RAW).build_batch(rollouts))
    white, same = columns(make_ppo().build_batch(rollouts))
    found = raw[[1, 2, 4]].astype(np.float64)
    np.testing.assert_allclose(white[[1, 2, 4]], (found - found.mean()) / found.std(ddof=1), rtol=1e-5)
    np.testing.assert_array_equal(returns, same)


def test_a_critic_that_knows_what_comes_explains_all_of_it():
    rollouts = make_rollouts([[0, 1, 1], [0, 1], [0, 1]], [1.0, 0.0, 0.5])
    told = rollouts.batch.token_columns[VALUES]
    told[:] = [1, 1, 0, 0, 0, 0.5, 0]  # the reward to come, before each generated token
    metrics = make_ppo().build_batch(rollouts).metrics
    assert metrics["critic/explained_variance"] == pytest.approx(1.0)
    assert metrics["critic/value_mean"] == metrics["critic/return_mean"] == pytest.approx(2.5 / 4)
    assert metrics["advantage_max"] == pytest.approx(0.0, abs=1e-6)


def test_the_likelihood_of_rewarded_samples_is_a_mean_over_their_tokens():
    rollouts = make_rollouts([[0, 1, 1], [0, 1], [0, 1]], [1.0, 0.0, -1.0])
    training = make_ppo(likelihood_coefficient=0.1).build_batch(rollouts)
    assert LIKELIHOOD_WEIGHTS in training.loss.token_columns
    assert training.batch.token_columns[LIKELIHOOD_WEIGHTS].tolist() == [0, 2, 2, 0, 0, 0, 0]
    assert LIKELIHOOD_WEIGHTS not in make_ppo().build_batch(rollouts).batch.token_columns


def test_nothing_to_train_on_is_said():
    rollouts = make_rollouts([[0, 0]], [0.0], valid=[False])
    assert make_ppo().build_batch(rollouts).no_signal is not None


def test_older_samples_are_taken_where_something_corrects_for_them():
    assert make_ppo(exact=True).needs.corrects_staleness
    assert make_ppo().needs.corrects_staleness
    assert not make_ppo(importance_correction="none").needs.corrects_staleness
