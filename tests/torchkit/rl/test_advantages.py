"""Advantages against a plain float64 reference, and the properties that bound them."""

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rlcore.spi import ContractError
from rlcore_torchkit.rl.advantages import (
    decoupled_advantages,
    group_advantages,
    process_advantages,
    turn_advantages,
    whitened,
)

BASELINES = ("group_mean", "leave_one_out")
NORMALISATIONS = ("std", "none")
EPSILON = 1e-6

group_sizes = st.lists(st.integers(1, 9), min_size=1, max_size=6)
options = st.tuples(st.sampled_from(BASELINES), st.sampled_from(NORMALISATIONS))
rewards_of_any_scale = st.floats(-1e6, 1e6, width=32)


def advantages(rewards, group_ids=None, baseline="group_mean", normalisation="std", epsilon=EPSILON):
    rewards = np.asarray(rewards, np.float32)
    group_ids = np.zeros(len(rewards), np.int32) if group_ids is None else np.asarray(group_ids, np.int32)
    return group_advantages(rewards, group_ids, baseline=baseline, normalisation=normalisation, epsilon=epsilon)


def reference_of_group(rewards, baseline, normalisation):
    """One group in plain Python floats: (r - mean) / std (DeepSeekMath, arXiv:2402.03300, section 4.1); the mean of the others
    (RLOO, arXiv:2402.14740); without the division (Dr.GRPO, arXiv:2503.20783, section 3.2)."""
    rewards = [float(reward) for reward in rewards]
    size = len(rewards)
    if max(rewards) - min(rewards) <= 1e-6 * max(abs(reward) for reward in rewards):
        return [0.0] * size
    mean = math.fsum(rewards) / size
    scale = 1.0
    if normalisation == "std":
        scale = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / (size - 1)) + EPSILON
    result = []
    for index, reward in enumerate(rewards):
        others = rewards[:index] + rewards[index + 1 :]
        base = mean if baseline == "group_mean" else math.fsum(others) / (size - 1)
        result.append((reward - base) / scale)
    return result


@settings(max_examples=25)
@given(st.data(), group_sizes, options)
def test_groups_match_the_plain_formula(data, sizes, chosen):
    baseline, normalisation = chosen
    groups = [data.draw(st.lists(st.floats(-5, 5, width=32), min_size=size, max_size=size)) for size in sizes]
    ids = np.repeat(np.cumsum([data.draw(st.integers(1, 3)) for _ in sizes]), sizes)  # numbers may be skipped
    expected = [value for group in groups for value in reference_of_group(np.float32(group), baseline, normalisation)]
    found = advantages(np.concatenate(groups), ids, baseline, normalisation)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)


@settings(max_examples=25)
@given(st.integers(2, 64), rewards_of_any_scale, rewards_of_any_scale, st.sampled_from(BASELINES))
def test_one_reward_apart_from_equal_others_is_bounded(size, common, lone, baseline):
    """A leave-one-out standard deviation is 0 here but for rounding, and dividing by it gives advantages of any size."""
    found = advantages([lone] + [common] * (size - 1), baseline=baseline)
    bound = (size - 1) / math.sqrt(size) if baseline == "group_mean" else math.sqrt(size)
    assert np.abs(found).max() <= bound * (1 + 1e-9)


@settings(max_examples=25)
@given(st.lists(rewards_of_any_scale, min_size=2, max_size=40), st.sampled_from(BASELINES))
def test_advantages_are_bounded_and_sum_to_zero(rewards, baseline):
    found = advantages(rewards, baseline=baseline)
    assert np.isfinite(found).all()
    assert np.abs(found).max() <= math.sqrt(len(rewards)) * (1 + 1e-9)
    assert abs(found.sum()) < 1e-8 * len(rewards)


@pytest.mark.parametrize("baseline", BASELINES)
def test_a_lone_success_weighs_more_in_a_larger_group(baseline):
    """It would be 1.0 for every size, were the deviation taken over the other samples."""
    lone = [advantages([1.0] + [0.0] * (size - 1), baseline=baseline, epsilon=0.0)[0] for size in (2, 4, 8, 16, 64)]
    assert np.all(np.diff(lone) > 0.1)
    eight = (0.875 if baseline == "group_mean" else 1.0) / math.sqrt(1 / 8)
    assert lone[2] == pytest.approx(eight, rel=1e-12)


@settings(max_examples=25)
@given(st.floats(1 / 1024, 1024, width=32), st.sampled_from(BASELINES))
def test_groups_of_two_are_normalised(gap, baseline):
    found = advantages([0.0, gap], baseline=baseline, epsilon=0.0)
    expected = math.sqrt(0.5) * (1 if baseline == "group_mean" else 2)
    np.testing.assert_allclose(found, [-expected, expected], rtol=1e-9)


@settings(max_examples=25)
@given(st.lists(st.integers(-8, 8), min_size=2, max_size=12), st.integers(-64, 64), st.sampled_from([0.25, 2.0, 16.0]), options)
def test_shift_of_rewards_changes_nothing_and_scale_only_where_not_normalised(rewards, shift, scale, chosen):
    baseline, normalisation = chosen
    plain = advantages(rewards, None, baseline, normalisation, epsilon=0.0)
    moved = advantages([reward * scale + shift for reward in rewards], None, baseline, normalisation, epsilon=0.0)
    np.testing.assert_allclose(moved, plain * (1 if normalisation == "std" else scale), rtol=1e-9, atol=1e-9)


@settings(max_examples=25)
@given(st.data(), group_sizes, options)
def test_groups_do_not_touch_each_other_and_order_within_does_not_matter(data, sizes, chosen):
    rewards = np.float32(data.draw(st.lists(st.floats(0, 1, width=32), min_size=sum(sizes), max_size=sum(sizes))))
    ids = np.repeat(np.arange(len(sizes)), sizes)
    order = np.concatenate(
        [np.flatnonzero(ids == group)[data.draw(st.permutations(range(n)))] for group, n in enumerate(sizes)]
    )
    together = advantages(rewards, ids, *chosen)
    np.testing.assert_allclose(advantages(rewards[order], ids, *chosen), together[order], rtol=1e-9, atol=1e-12)
    alone = [advantages(rewards[ids == group], None, *chosen) for group in range(len(sizes))]
    np.testing.assert_allclose(np.concatenate(alone), together, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("normalisation", NORMALISATIONS)
@pytest.mark.parametrize(
    "rewards", [[0.0] * 4, [1.0] * 4, [0.1, np.nextafter(np.float32(0.1), np.float32(1)), 0.1], [-3e7, -3e7 + 2], [5.0]]
)
def test_rewards_equal_to_rounding_give_exactly_zero(rewards, baseline, normalisation):
    assert not advantages(rewards, None, baseline, normalisation).any()


def test_small_differences_over_a_large_level_are_not_cancelled():
    """Squares of rewards lose them in float32, and their difference from the squared mean in any precision."""
    level = np.float32(1e4) + np.float32([0.0, 0.0, 0.5, 1.0])
    np.testing.assert_allclose(advantages(level, epsilon=0.0), advantages([0.0, 0.0, 0.5, 1.0], epsilon=0.0), rtol=1e-12)


def test_no_samples_give_no_advantages():
    assert advantages([]).shape == (0,)


def turns(episodes, group_ids, baseline="group_mean", normalisation="std", *, function=turn_advantages):
    """The advantages of each turn of episodes, which are lists of rewards."""
    num_turns = np.asarray([len(rewards) for rewards in episodes], np.int64)
    rewards = np.asarray([reward for rewards in episodes for reward in rewards], np.float32)
    ids = np.asarray(group_ids, np.int32)
    return function(rewards, num_turns, ids, baseline=baseline, normalisation=normalisation, epsilon=EPSILON)


@settings(max_examples=25)
@given(
    st.lists(st.lists(st.lists(st.integers(-4, 4), min_size=1, max_size=4), min_size=1, max_size=5), min_size=1, max_size=4),
    options,
)
def test_turns_are_compared_by_what_was_earned_from_there_on(groups, chosen):
    """In plain Python floats: the reward-to-go Σ_{l≥k} r_l of each turn, among the turns k of its group."""
    expected = []
    for group in groups:
        to_go = [[math.fsum(episode[k:]) for k in range(len(episode))] for episode in group]
        for episode in to_go:
            for k, value in enumerate(episode):
                cell = [other[k] for other in to_go if len(other) > k]
                place = sum(len(other) > k for other in to_go[: to_go.index(episode)])
                assert cell[place] == value
                expected.append(reference_of_group(cell, *chosen)[place] if len(cell) > 1 else 0.0)
    found = turns(
        [episode for group in groups for episode in group], np.repeat(range(len(groups)), list(map(len, groups))), *chosen
    )
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)


@settings(max_examples=25)
@given(
    st.lists(st.lists(st.lists(st.integers(-4, 4), min_size=1, max_size=4), min_size=1, max_size=5), min_size=1, max_size=4),
    options,
)
def test_process_supervision_adds_up_the_normalised_rewards_from_a_turn_on(groups, chosen):
    """In plain Python floats, by section 4.1.3 of arXiv:2402.03300: R holds the rewards of all turns of a group, and the
    advantage of a turn is the sum of its own and of later turns' rewards, each normalised in R."""
    expected = []
    for group in groups:
        compared = [reward for episode in group for reward in episode]
        normalised = iter(reference_of_group(compared, *chosen) if len(compared) > 1 else [0.0])
        for episode in group:
            own = [next(normalised) for _ in episode]
            expected += [math.fsum(own[turn:]) for turn in range(len(own))]
    found = turns(
        [episode for group in groups for episode in group],
        np.repeat(range(len(groups)), list(map(len, groups))),
        *chosen,
        function=process_advantages,
    )
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)


def test_normalised_rewards_that_cancel_are_no_signal():
    """1/3 of 0, 1 and 2 each: from the first turn on, all episodes sum to the mean."""
    found = turns([[0.0, 2.0, 1.0], [1.0, 0.0, 2.0], [2.0, 1.0, 0.0]], [0, 0, 0], function=process_advantages)
    assert not found[[0, 3, 6]].any()
    assert found[[2, 5, 8]].tolist() == pytest.approx(
        [0.0, 1.0 / std_of([0, 1, 2] * 3), -1.0 / std_of([0, 1, 2] * 3)], rel=1e-5
    )


@pytest.mark.parametrize("function", [turn_advantages, process_advantages])
def test_with_one_turn_each_turns_are_episodes(function):
    rewards, ids = [1.0, 0.0, 0.5, 3.0, 1.0], [0, 0, 0, 2, 2]
    np.testing.assert_array_equal(turns([[reward] for reward in rewards], ids, function=function), advantages(rewards, ids))


def test_rewards_that_cancel_are_no_difference():
    assert not turns([[0.1, 0.2, -0.3], [0.3, -0.3, 0.0], [0.0, 0.0, 0.0]], [0, 0, 0])[[0, 3, 6]].any()


@pytest.mark.parametrize("function", [turn_advantages, process_advantages])
def test_an_episode_without_turns_and_none_at_all(function):
    assert turns([[], [1.0], [0.0]], [0, 0, 0], function=function).tolist() == advantages([1.0, 0.0]).tolist()
    assert turns([], [], function=function).shape == (0,)


NEW_NORMALISATIONS = ("leave_one_out_std", "batch_std", "mean")
whole_numbers = st.lists(st.lists(st.integers(0, 8), min_size=1, max_size=6), min_size=1, max_size=5)
"""Groups of rewards that are 0 or above, and equal or well apart."""


def packed(groups):
    """The rewards of all groups, float64, and their group ids."""
    return np.array([reward for group in groups for reward in group], np.float64), np.repeat(
        range(len(groups)), list(map(len, groups))
    )


def std_of(values):
    """Standard deviation with ddof = 1, 0 of fewer than two."""
    mean = math.fsum(values) / max(len(values), 1)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / max(len(values) - 1, 1))


def reference_of_batch(groups, baseline, normalisation):
    """All groups in plain Python floats: the baseline over the group or the step (REINFORCE with a mean baseline; Williams,
    1992), and divided by the std of the others with half the group's as a bound, of the step's rewards, or by the group's mean
    (MaxRL, arXiv:2602.02710, whose estimator is the mean of the successes' scores less that of all)."""
    everything = [float(reward) for group in groups for reward in group]
    result = []
    for group in groups:
        compared = everything if baseline == "batch_mean" else list(map(float, group))
        for index, reward in enumerate(group):
            others = [other for place, other in enumerate(group) if place != index]
            if max(compared) == min(compared):
                result.append(0.0)
                continue
            base = math.fsum(compared) / len(compared)
            if baseline == "leave_one_out":
                base = math.fsum(others) / len(others)
            divisor = 1.0 - EPSILON
            if normalisation == "leave_one_out_std":
                divisor = max(std_of(others), std_of(group) / 2)
            elif normalisation == "batch_std":
                divisor = std_of(everything)
            elif normalisation == "mean":
                divisor = math.fsum(group) / len(group)
            result.append((reward - base) / (divisor + EPSILON))
    return result


@settings(max_examples=40)
@given(
    whole_numbers,
    st.sampled_from(
        [
            ("group_mean", "leave_one_out_std"),
            ("leave_one_out", "leave_one_out_std"),
            ("group_mean", "batch_std"),
            ("leave_one_out", "batch_std"),
            ("batch_mean", "batch_std"),
            ("batch_mean", "none"),
            ("batch_mean", "batch_whitening"),
            ("group_mean", "mean"),
        ]
    ),
)
def test_other_baselines_and_divisors_match_the_plain_formula(groups, chosen):
    rewards, ids = packed(groups)
    found = advantages(rewards, ids, *chosen)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, reference_of_batch(groups, *chosen), rtol=1e-7, atol=1e-9)


@given(whole_numbers, st.sampled_from(["none", "batch_whitening"]))
def test_without_a_baseline_rewards_stay_as_they_are(groups, normalisation):
    rewards, ids = packed(groups)
    assert advantages(rewards, ids, "none", normalisation).tolist() == rewards.tolist()


@settings(max_examples=40)
@given(st.lists(rewards_of_any_scale, min_size=2, max_size=40), st.sampled_from(BASELINES))
def test_the_standard_deviation_of_the_others_is_bounded(rewards, baseline):
    """It is 0 but for rounding where one reward differs from equal others, and advantages would be of any size."""
    found = np.abs(advantages(rewards, None, baseline, "leave_one_out_std"))
    assert (found <= 2 * np.abs(advantages(rewards, None, baseline, "std")) * (1 + 1e-6)).all()


def test_with_the_others_deviation_a_lone_success_weighs_more_in_a_larger_group_and_two_samples_are_normalised():
    lone = [
        advantages([1.0] + [0.0] * (size - 1), None, "leave_one_out", "leave_one_out_std", 0.0)[0] for size in (2, 4, 8, 64)
    ]
    np.testing.assert_allclose(lone, [2 * math.sqrt(size) for size in (2, 4, 8, 64)], rtol=1e-12)


@given(st.integers(1, 40), st.integers(1, 40))
def test_a_success_weighs_by_how_rare_it_is_and_all_success_like_all_failure_is_no_signal(num_right, num_wrong):
    """With K of n successes (n - K)/K and -1: 1/p - 1, the weight of maximum likelihood (arXiv:2602.02710)."""
    found = advantages([1.0] * num_right + [0.0] * num_wrong, None, "group_mean", "mean", epsilon=0.0)
    np.testing.assert_allclose(found, [num_wrong / num_right] * num_right + [-1.0] * num_wrong, rtol=1e-12)
    assert not advantages([1.0] * num_right, None, "group_mean", "mean").any()
    assert not advantages([0.0] * num_wrong, None, "group_mean", "mean").any()


@settings(max_examples=25)
@given(whole_numbers, st.data(), st.sampled_from(NEW_NORMALISATIONS))
def test_the_order_of_groups_and_of_samples_does_not_matter(groups, data, normalisation):
    rewards, ids = packed(groups)
    order = np.concatenate(
        [
            np.flatnonzero(ids == group)[data.draw(st.permutations(range(len(groups[group]))))]
            for group in data.draw(st.permutations(range(len(groups))))
        ]
    )
    renumbered = np.cumsum(np.diff(ids[order], prepend=ids[order[0]]) != 0)
    together = advantages(rewards, ids, "group_mean", normalisation)
    np.testing.assert_allclose(advantages(rewards[order], renumbered, "group_mean", normalisation), together[order], rtol=1e-9)
    for group in range(len(groups)):
        assert abs(together[ids == group].sum()) < 1e-9 or normalisation == "leave_one_out_std"


@settings(max_examples=40)
@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=50), st.floats(-64, 64), st.sampled_from([0.5, 8.0]))
def test_whitening_has_mean_0_and_deviation_1_and_no_shift_or_scale_changes_it(values, shift, scale):
    values = np.round(np.array(values, np.float64), 2)
    found = whitened(values, epsilon=0.0)
    if values.max() - values.min() <= 1e-6 * np.abs(values).max():
        assert not found.any()
        return
    expected = [(value - math.fsum(values) / len(values)) / std_of(values.tolist()) for value in values.tolist()]
    np.testing.assert_allclose(found, expected, rtol=1e-7, atol=1e-9)
    assert np.abs(found).max() <= math.sqrt(len(values))
    np.testing.assert_allclose(whitened(values * scale + shift, epsilon=0.0), found, rtol=1e-6, atol=1e-8)


def decoupled(components, ids, weights):
    options = {"baseline": "group_mean", "normalisation": "std", "epsilon": EPSILON}
    return decoupled_advantages([np.array(one, np.float32) for one in components], weights, np.asarray(ids), **options)


@settings(max_examples=25)
@given(st.data(), whole_numbers, st.integers(1, 3))
def test_components_are_normalised_one_by_one_and_their_sum_over_the_step(data, groups, num_components):
    """GDPO (arXiv:2601.05242) in plain Python floats."""
    sizes = list(map(len, groups))
    parts = [
        [data.draw(st.lists(st.integers(-3, 3), min_size=size, max_size=size)) for size in sizes] for _ in range(num_components)
    ]
    weights = data.draw(st.lists(st.sampled_from([0.5, 1.0, 4.0]), min_size=num_components, max_size=num_components))
    of_parts = [[value for group in part for value in reference_of_group(group, "group_mean", "std")] for part in parts]
    sums = [
        math.fsum(weight * value for weight, value in zip(weights, column, strict=True))
        for column in zip(*of_parts, strict=True)
    ]
    # Opposite components cancel but for their epsilons, which the sum takes for equal and this formula does not.
    assume(all(value == 0 or abs(value) > 1e-4 for value in sums))
    divisor = std_of(sums) + EPSILON
    mean = math.fsum(sums) / len(sums)
    expected = [(value - mean) / divisor if std_of(sums) > 1e-7 else 0.0 for value in sums]
    ids = np.repeat(range(len(sizes)), sizes)
    found = decoupled([[value for group in part for value in group] for part in parts], ids, weights)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-8)


def test_a_small_component_tells_samples_apart_that_a_sum_cannot():
    """The papers' example: rewards (0, 1) and (0, 2) in a group are one and the same to a sum that is normalised afterwards."""
    one, both = (
        decoupled([[0, 1, 0, 0], [0, 0, 0, 0]], [0, 0, 1, 1], [1, 1]),
        decoupled([[0, 1, 0, 1], [0, 0, 0, 1]], [0, 0, 1, 1], [1, 1]),
    )
    assert one[2:].tolist() == [0.0, 0.0]
    assert both[3] == pytest.approx(2 * both[1])


def test_components_that_cancel_are_no_difference():
    component = [0.1, 0.7, 0.2, 0.4]
    assert not decoupled([component, np.negative(component)], [0, 0, 0, 0], [1.0, 1.0]).any()
    assert decoupled([], [0, 0], []).tolist() == [0.0, 0.0]
    assert whitened(np.zeros(0), epsilon=0.0).shape == (0,)


def test_groups_of_equal_components_get_no_rounding_of_the_steps_mean() -> None:
    random = np.random.default_rng(0)
    ids = np.repeat(np.arange(6), 8)
    for _ in range(20):
        components = random.integers(0, 3, (2, 48)) / 4
        components[:, :16] = 0.5
        found = decoupled(components, ids, [1.0, 1.0])
        assert not found[:16].any()
        assert found[16:].any()
        assert found.mean() == pytest.approx(0.0, abs=1e-12)


def test_nor_what_advantages_that_do_not_sum_to_zero_leave_in_that_mean() -> None:
    """A step's mean is no baseline of a group that tells no samples apart: all of its samples would be discouraged."""
    rewards = np.float32([1, 0, 0, 0, 1, 1, 1, 1])
    options = {"baseline": "group_mean", "normalisation": "leave_one_out_std", "epsilon": EPSILON}
    found = decoupled_advantages([rewards], [1.0], np.repeat([0, 1], 4), **options)
    assert (found[:4] != 0).all()
    assert not found[4:].any()
    assert decoupled_advantages([rewards[:0]], [1.0], np.arange(0), **options).shape == (0,)


@pytest.mark.parametrize("options", [{"baseline": "mean"}, {"normalisation": "sd"}])
def test_an_unknown_name_is_refused(options):
    (name,) = options.values()
    with pytest.raises(ContractError, match=f"found '{name}'; expected one of"):
        advantages([0.0, 1.0], **options)
