"""Quantiles of the lengths of answers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore_plan.lengths import response_lengths


@given(st.integers(16, 100_000), st.floats(0.01, 0.99))
def test_lengths_have_the_mean_and_keep_the_limit(limit: int, share: float) -> None:
    lengths = response_lengths(share * limit, limit)
    assert sum(lengths) / len(lengths) == pytest.approx(share * limit, rel=1e-3)
    assert list(lengths) == sorted(lengths)
    assert lengths[-1] <= limit


def test_a_mean_of_the_limit_is_the_limit_for_all() -> None:
    assert set(response_lengths(512, 512)) == {512.0}
