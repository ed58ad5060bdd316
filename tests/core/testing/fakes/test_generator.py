"""What the fake generator draws from: the truncated distribution, by uniform numbers that follow from the seed alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from rlcore.spi import SamplingParams
from rlcore.testing.fakes.generator import choose, truncate, uniforms
from rlcore.testing.fakes.policy import log_softmax

LOGITS = arrays.arrays(np.float64, (3, 6), elements=st.floats(-5, 5, width=16), unique=True)


def kept_of(row, top_k, top_p):
    """The k most probable tokens, then the fewest of these that have top_p of their mass: token by token."""
    ranked = sorted(range(len(row)), key=lambda token: -row[token])[: top_k or len(row)]
    weights = np.exp(row[ranked])
    kept, mass = set(), 0.0
    for token, share in zip(ranked, weights / weights.sum(), strict=True):
        if mass < top_p:
            kept.add(token)
        mass += share
    return kept


@given(values=LOGITS, top_k=st.integers(0, 7), top_p=st.sampled_from([0.05, 0.33, 0.71, 1.0]))
def test_what_is_left_of_the_distribution_is_what_a_loop_leaves(values, top_k, top_p):
    found = truncate(values, SamplingParams(top_k=top_k, top_p=top_p))
    for row, left in zip(values, found, strict=True):
        assert {token for token in range(6) if np.isfinite(left[token])} == kept_of(row, top_k, top_p)
        np.testing.assert_array_equal(left[np.isfinite(left)], row[np.isfinite(left)])


@given(values=LOGITS, uniform=st.floats(0, 1, exclude_max=True), temperature=st.sampled_from([0.5, 1.0, 3.0]))
def test_a_draw_is_where_the_cumulated_distribution_passes_it(values, uniform, temperature):
    tokens, logprobs = choose(values, SamplingParams(temperature=temperature), np.full(3, uniform))
    table = log_softmax(values / temperature)
    for token, logprob, row in zip(tokens, logprobs, table, strict=True):
        below, above = np.exp(row[:token]).sum(), np.exp(row[: token + 1]).sum()
        assert below - 1e-9 <= uniform <= above + 1e-9
        assert logprob == row[token]


def test_at_temperature_nought_the_most_probable_token_has_its_untempered_logprob():
    values = np.asarray([[0.0, 2.0, 1.0]])
    tokens, logprobs = choose(values, SamplingParams(temperature=0.0, top_k=1), np.zeros(1))
    assert tokens.tolist() == [1]
    assert logprobs == pytest.approx(log_softmax(values)[:, 1])


def test_uniform_numbers_follow_from_seed_and_step_and_are_even():
    seeds = np.arange(4096)
    first, second = uniforms(seeds, 0), uniforms(seeds, 1)
    np.testing.assert_array_equal(first[7:9], uniforms(seeds[7:9], 0))
    assert len({*first, *second}) == 2 * len(seeds)
    for drawn in (first, second):
        assert 0.0 <= drawn.min() < drawn.max() < 1.0
        counts = np.histogram(drawn, bins=16, range=(0, 1))[0]
        assert abs(counts - 256).max() < 6 * 16
