"""The sampler by itself: its noise, its distribution, its truncation."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from transformers import TopKLogitsWarper, TopPLogitsWarper

from rlcore.spi import SamplingParams
from rlcore_transformers.sampling import exponentials, position_keys, sample_tokens, truncate

NUM_DRAWS = 40_000


def chi_square(counts, probabilities):
    """Pearson's statistic, of mean len(probabilities) - 1 and variance twice that where the draws are right."""
    expected = probabilities * counts.sum()
    return ((counts - expected) ** 2 / expected).sum()


def limit(degrees):
    """Five standard deviations above the mean: never reached by chance."""
    return degrees + 5 * np.sqrt(2 * degrees)


def keys_of(seeds, positions):
    return torch.from_numpy(position_keys(np.asarray(seeds, np.int64), np.asarray(positions, np.int64)))


@pytest.mark.parametrize("vary", ["seed", "position"])
@pytest.mark.parametrize(
    "sampling", [SamplingParams(), SamplingParams(temperature=0.7, top_k=7), SamplingParams(top_p=0.8)], ids=str
)
def test_frequencies_follow_the_probabilities(vary, sampling):
    logits = torch.randn(12, generator=torch.Generator().manual_seed(0)) * 1.5
    counter, fixed = np.arange(NUM_DRAWS), np.full(NUM_DRAWS, 17)
    keys = keys_of(counter, fixed) if vary == "seed" else keys_of(fixed, counter)
    tokens, logprobs, _ = sample_tokens(logits.expand(NUM_DRAWS, -1), keys, sampling)
    drawn, first = np.unique(tokens.numpy(), return_index=True)
    probabilities = np.exp(logprobs.numpy()[first].astype(np.float64))
    assert probabilities.sum() == pytest.approx(1.0, abs=1e-5)
    assert chi_square(np.bincount(tokens.numpy())[drawn], probabilities) < limit(len(drawn) - 1)


def test_a_rare_token_is_drawn_as_often_as_it_should_be():
    num_tokens, probability = 300, 1e-3
    logits = torch.full((num_tokens,), float(np.log((1 - probability) / (num_tokens - 1))))
    logits[123] = float(np.log(probability))
    tokens, _, _ = sample_tokens(logits.expand(NUM_DRAWS, -1), keys_of(range(NUM_DRAWS), np.zeros(NUM_DRAWS)), SamplingParams())
    expected = probability * NUM_DRAWS
    assert abs(int((tokens == 123).sum()) - expected) < 5 * np.sqrt(expected)


def test_noise_is_exponential_and_independent_of_its_neighbours():
    noise = exponentials(keys_of(np.arange(2000), np.full(2000, 3)), 64).double().numpy()
    assert noise.min() > 0.0
    assert noise.mean() == pytest.approx(1.0, abs=0.02)
    assert noise.var() == pytest.approx(1.0, abs=0.05)
    uniform = np.exp(-noise)
    counts = np.histogram(uniform, 32, (0, 1))[0]
    assert chi_square(counts, np.full(32, 1 / 32)) < limit(31)
    for other in (np.roll(uniform, 1, 0), np.roll(uniform, 1, 1), np.roll(uniform, 16, 1)):
        assert abs(np.corrcoef(uniform.ravel(), other.ravel())[0, 1]) < 5 / np.sqrt(uniform.size)
        joint = np.histogram2d(uniform.ravel(), other.ravel(), 8, ((0, 1), (0, 1)))[0].ravel()
        assert chi_square(joint, np.full(64, 1 / 64)) < limit(63)


def test_noise_is_the_documented_hash():
    """The same in Python's integers, so that no device or vector width can change it unnoticed."""
    keys, num_tokens = [0, 1, 2**31 - 1, 123456789], 300
    found = exponentials(torch.tensor(keys, dtype=torch.int32), num_tokens)
    for row, key in enumerate(keys):
        for token in (0, 1, 7, 299):
            bits = key ^ (token * 0x1E3779B1 & 0x7FFFFFFF)
            for factor, shift in ((0x7FEB352D, 15), (0x6C8E9CF5, 16)):
                bits = bits * factor & 0x7FFFFFFF
                bits ^= bits >> shift
            assert found[row, token].item() == pytest.approx(-np.log1p(-(bits + 0.5) / 2**31), rel=1e-6)


def test_keys_differ_by_seed_and_by_position():
    seeds, positions = np.meshgrid(np.arange(300), np.arange(300))
    keys = position_keys(seeds.ravel(), positions.ravel())
    assert keys.dtype == np.int32
    assert keys.min() >= 0
    assert len(np.unique(keys)) > len(keys) - 20


@settings(deadline=None, max_examples=60)
@given(
    weights=arrays(np.float64, st.tuples(st.integers(1, 4), st.integers(1, 40)), elements=st.floats(0.001, 1.0), unique=True),
    top_k=st.integers(0, 45),
    top_p=st.floats(0.01, 1.0),
)
def test_truncation_keeps_the_smallest_set_that_reaches_top_p(weights, top_k, top_p):
    probabilities = torch.from_numpy(weights / weights.sum(-1, keepdims=True)).float()
    found = truncate(probabilities, top_k, top_p).double().numpy()
    np.testing.assert_allclose(found.sum(-1), 1.0, atol=1e-5)
    for row, kept in zip(probabilities.double().numpy(), found > 0.0, strict=True):
        ranked = np.sort(row)[::-1][: top_k or None]
        shares = ranked / ranked.sum()
        smallest = int(np.searchsorted(np.cumsum(shares), top_p - 1e-5)) + 1
        largest = min(int(np.searchsorted(np.cumsum(shares), top_p + 1e-5)) + 1, len(ranked))
        ties = int((row == ranked[largest - 1]).sum()) - 1
        assert smallest <= kept.sum() <= largest + ties
        assert row[kept].min() >= np.delete(row, np.flatnonzero(kept)).max(initial=0.0)


def test_rounding_of_the_logits_almost_never_changes_a_token():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(4000, 500, generator=generator)
    nudged = logits + 1e-6 * torch.randn(logits.shape, generator=generator)
    keys = keys_of(np.arange(4000), np.zeros(4000))
    first, _, _ = sample_tokens(logits, keys, SamplingParams())
    second, _, _ = sample_tokens(nudged, keys, SamplingParams())
    assert int((first != second).sum()) <= 1


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(top_p=0.8),
        SamplingParams(temperature=0.7, top_k=7),
        SamplingParams(temperature=1.4, top_k=20, top_p=0.5),
        SamplingParams(top_p=1e-6),
    ],
    ids=str,
)
def test_what_is_kept_is_what_the_warpers_of_transformers_keep(sampling):
    logits = torch.randn(200, 60, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    tokens, logprobs, kept = sample_tokens(logits, keys_of(np.arange(200), np.zeros(200)), sampling)
    warped = logits / sampling.temperature
    if sampling.top_k:
        warped = TopKLogitsWarper(sampling.top_k)(None, warped)
    if sampling.top_p < 1:
        warped = TopPLogitsWarper(sampling.top_p)(None, warped)
    np.testing.assert_array_equal(kept, warped.isfinite())
    expected = torch.log_softmax(warped, -1).gather(1, tokens[:, None])[:, 0]
    np.testing.assert_allclose(logprobs, expected, atol=1e-5)


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=0.0, top_k=3), SamplingParams(top_k=60)])
def test_nothing_is_said_to_be_kept_where_everything_is(sampling):
    assert sample_tokens(torch.randn(3, 60), keys_of(np.arange(3), np.zeros(3)), sampling)[2] is None
