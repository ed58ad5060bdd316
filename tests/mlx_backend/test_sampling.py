"""What tokens are drawn from, and what a draw depends on."""

import mlx.core as mx
import numpy as np
import pytest

from rlcore.spi import SamplingParams
from rlcore_conformance.references.reference import sampling_distribution
from rlcore_mlx.sampling import position_keys, sample_tokens, truncate

LOGITS = np.random.default_rng(0).normal(0, 2, (6, 50)).astype(np.float32)
SEEDS = np.array([0, 1, 2**40, 2**40 + 1, 2**62, 7])


@pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"top_p": 0.6}, {"top_k": 20, "top_p": 0.8}, {"temperature": 0.0}])
def test_log_probabilities_are_those_of_the_distribution(options):
    sampling = SamplingParams(**{"temperature": 0.7, **options})
    table, _ = sampling_distribution(LOGITS.astype(np.float64), sampling)
    tokens, logprobs = map(np.array, sample_tokens(mx.array(LOGITS), position_keys(SEEDS, SEEDS % 5), sampling))
    np.testing.assert_allclose(logprobs, table[np.arange(6), tokens], atol=1e-5)


def test_truncation_keeps_what_the_definition_keeps():
    logits = LOGITS.astype(np.float64)
    plain, _ = sampling_distribution(logits, SamplingParams())
    expected, _ = sampling_distribution(logits, SamplingParams(top_k=10, top_p=0.7))
    found = np.array(truncate(mx.array(plain.astype(np.float32)), 10, 0.7))
    np.testing.assert_array_equal(np.isfinite(found), np.isfinite(expected))
    np.testing.assert_allclose(found[np.isfinite(found)], expected[np.isfinite(expected)], atol=1e-5)


def test_a_draw_depends_on_seed_and_position_and_not_on_its_row():
    keys = np.array(position_keys(SEEDS, np.arange(6)))
    assert len({tuple(key) for key in keys}) == 6
    assert (np.array(position_keys(SEEDS, np.arange(6) + 1)) != keys).any(1).all()
    wide = mx.array(np.repeat(LOGITS[:1], 6, 0))
    order = np.array([3, 1, 5, 0, 4, 2])
    tokens = np.array(sample_tokens(wide, mx.array(keys), SamplingParams())[0])
    np.testing.assert_array_equal(np.array(sample_tokens(wide, mx.array(keys[order]), SamplingParams())[0]), tokens[order])


def test_frequencies_are_probabilities():
    num = 20_000
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    keys = position_keys(np.arange(num), np.zeros(num, np.int64))
    tokens = np.array(sample_tokens(mx.array(np.tile(logits, (num, 1))), keys, SamplingParams())[0])
    np.testing.assert_allclose(np.bincount(tokens, minlength=4) / num, np.exp(logits), atol=0.015)
