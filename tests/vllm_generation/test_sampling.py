"""What requests become on their way to the engines, and back."""

import numpy as np
import pytest

from rlcore.spi import FinishReason, SamplingParams
from rlcore_vllm.engines.sampling import engine_sampling, engine_seeds, finish_reason


def test_seeds_differ_in_all_their_bits():
    """Seeds that only differ above bit 31, or by one, become quite different ones; all lie within 32 bits."""
    seeds = np.array([0, 1, 2**32, 2**33, 2**62, 2**63 - 1], np.int64)
    mixed = engine_seeds(seeds)
    assert len(set(mixed)) == len(seeds)
    assert all(0 <= seed < 2**32 for seed in mixed)
    assert len(set(engine_seeds(np.arange(10_000, dtype=np.int64)))) > 9_990


@pytest.mark.parametrize(
    ("reason", "num_tokens", "expected"),
    [
        ("stop", 3, FinishReason.STOP),
        ("stop", 8, FinishReason.STOP),
        ("length", 8, FinishReason.LENGTH),
        ("length", 7, FinishReason.ABORTED),
        ("abort", 8, FinishReason.ABORTED),
        ("error", 0, FinishReason.ABORTED),
        ("repetition", 5, FinishReason.ABORTED),
        ("a reason of a later version", 5, FinishReason.ABORTED),
    ],
)
def test_only_a_stop_is_a_finished_answer(reason, num_tokens, expected):
    assert finish_reason(reason, num_tokens, 8) is expected


def test_low_temperatures_are_taken_as_they_are():
    """vLLM itself would raise them to 0.01."""
    params = engine_sampling(SamplingParams(temperature=0.002), 3, 5, logprobs=0)
    assert (params.temperature, params.seed, params.max_tokens, params.ignore_eos, params.logprobs) == (0.002, 3, 5, True, 0)
    assert engine_sampling(SamplingParams(), 3, 5, logprobs=None).logprobs is None
