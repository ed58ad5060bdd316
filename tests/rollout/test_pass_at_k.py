"""pass@k: the estimate against all subsets of the samples, its intervals against simulated evaluations."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore_rollout.evaluation import pass_at_k, pass_at_k_interval, pass_metrics


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_it_is_the_share_of_subsets_with_a_solution(drawn: tuple[int, int, int]) -> None:
    n, c, k = drawn
    subsets = list(combinations([True] * c + [False] * (n - c), k))
    expected = np.mean([any(subset) for subset in subsets], dtype=np.float64)
    (found,) = pass_at_k(np.asarray([n]), np.asarray([c]), k)
    assert found == pytest.approx(expected, abs=1e-12)


def test_many_samples_stay_exact() -> None:
    found = pass_at_k(np.asarray([100_000, 100_000]), np.asarray([1, 99_999]), 100)
    np.testing.assert_allclose(found, [0.001, 1.0], rtol=1e-10)


def test_fewer_samples_than_k_are_refused() -> None:
    with pytest.raises(ValueError, match="pass@4 of 3"):
        pass_at_k(np.asarray([8, 3]), np.asarray([1, 1]), 4)


@pytest.mark.parametrize(
    ("solved", "number", "low", "high"),
    # Of Newcombe 1998 (Statistics in Medicine 17:857-872), table I, method 3.
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_one_sample_a_prompt_has_wilsons_interval(solved: int, number: int, low: float, high: float) -> None:
    counts = np.asarray([1] * solved + [0] * (number - solved))
    found = pass_at_k_interval(np.ones(number, np.int64), counts, 1)
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-4)
    assert found.mean == solved / number


@pytest.mark.parametrize(("num_samples", "k"), [(1, 1), (4, 1), (8, 4)])
def test_intervals_hold_the_truth_about_as_often_as_they_say(num_samples: int, k: int) -> None:
    random, num_prompts, num_trials = np.random.default_rng(k), 60, 150
    truth = 1 - np.prod([(2 + drawn) / (3 + drawn) for drawn in range(k)])  # of prompts with rates from Beta(1, 2)
    held = 0
    for _ in range(num_trials):
        solved = random.binomial(num_samples, random.beta(1, 2, num_prompts))
        found = pass_at_k_interval(np.full(num_prompts, num_samples), solved, k)
        held += found.low <= truth <= found.high
    assert 0.89 <= held / num_trials <= 0.99


def test_metrics_go_by_prompts_in_any_order() -> None:
    prompts, solved = np.asarray([5, 3, 5, 3], np.int32), np.asarray([True, False, False, False])
    assert pass_metrics(solved, prompts, [1, 2], with_bounds=False) == {"eval/pass@1": 0.25, "eval/pass@2": 0.5}
    with_bounds = pass_metrics(solved, prompts, [2], with_bounds=True)
    assert with_bounds == {"eval/pass@2": 0.5, "eval/pass@2_low": 0.0, "eval/pass@2_high": 1.0}
