"""Curves with few points: what is kept of many, and that nothing that is not finite gets through."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rlcore_report.curves import bars, curves, evenly, m4, medians, rounded

POINTS = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300).map(lambda values: list(enumerate(values, start=5)))


@given(points=POINTS, buckets=st.integers(1, 20))
def test_ends_and_extremes_are_kept_in_order(points: list[tuple[int, float]], buckets: int) -> None:
    kept = m4(points, buckets)
    assert len(kept) <= 4 * buckets
    assert [step for step, _ in kept] == sorted({step for step, _ in kept})
    assert set(kept) <= set(points)
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    assert max(value for _, value in kept) == max(value for _, value in points)
    assert min(value for _, value in kept) == min(value for _, value in points)


def test_each_interval_keeps_its_own_extremes() -> None:
    values = np.sin(np.arange(1000) / 7.0)
    kept = m4(list(enumerate(values.tolist())), 10)
    for start in range(0, 1000, 100):
        inside = [value for step, value in kept if start <= step < start + 100]
        assert (min(inside), max(inside)) == (values[start : start + 100].min(), values[start : start + 100].max())


def test_what_is_not_finite_is_told_apart() -> None:
    records = [{"step": 1, "loss": 0.5}, {"step": 2, "loss": math.nan}, {"step": 3, "loss": math.inf, "kl": 0.1}]
    assert curves(records) == {"loss": {"x": [1], "y": [0.5], "bad": [2, 3]}, "kl": {"x": [3], "y": [0.1], "bad": []}}


def test_bars_are_means_over_steps_that_have_times() -> None:
    records = [{"step": 0, "other": 1.0}, *({"step": step, "a": float(step), "b": math.nan} for step in range(1, 6))]
    found = bars(records, ["a", "b", "c"], num_bars=2)
    assert found == {"steps": [1, 4], "num": [3, 2], "values": [[2.0, 0.0, 0.0], [4.5, 0.0, 0.0]]}
    assert bars([], ["a"]) == {"steps": [], "num": [], "values": []}


@given(items=st.lists(st.integers(), max_size=50, unique=True).map(sorted), num=st.integers(1, 20))
def test_some_of_many_are_spread_evenly(items: list[int], num: int) -> None:
    chosen = evenly(items, num)
    assert len(chosen) == min(num, len(items))
    assert chosen == sorted(chosen)
    if items:
        assert chosen[-1] == items[-1]
    if items and num > 1:
        assert chosen[0] == items[0]


def test_medians_are_of_the_finite_values() -> None:
    records = [{"step": step, "a": value} for step, value in enumerate((90.0, 1.0, math.nan, 3.0))]
    assert medians([*records, {"step": 4, "b": math.inf}], ["a", "b", "c"]) == {"a": 3.0}


def test_ratios_near_one_stay_apart() -> None:
    assert rounded(1.000001234567) == 1.0000012
