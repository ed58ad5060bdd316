"""Generators refuse bad requests, find the ends of samples, and join ended samples."""

import numpy as np
import pytest

from rlcore.spi import ContractError, FinishReason, GenerateRequest, RaggedTokens, SamplingParams
from rlcore_torchkit.generation import FinishedSample, check_sampling, join_samples, sample_limits, splitmix64


def request_of(lengths: list[int], num_samples: int) -> GenerateRequest:
    """Prompts of these lengths, numbered tokens, eight tokens for each sample."""
    count = len(lengths) * num_samples
    return GenerateRequest(
        prompts=RaggedTokens.from_lists([list(range(length)) for length in lengths]),
        num_samples=num_samples,
        seeds=np.arange(count, dtype=np.int64),
        max_tokens=np.full(count, 8, np.int32),
        sampling=SamplingParams(),
        weight_version=0,
    )


@pytest.mark.parametrize(
    ("options", "smallest", "found"),
    [
        ({"temperature": -1.0}, 0.0, "temperature = -1.0"),
        ({"temperature": float("nan")}, 0.0, "temperature = nan"),
        ({"temperature": 1e-7}, 1e-5, "temperature = 1e-07"),
        ({"top_k": -1}, 1e-5, "top_k = -1"),
        ({"top_p": 0.0, "stop_strings": ("",)}, 0.0, r"top_p = 0.0, stop_strings = \('',\)"),
    ],
)
def test_sampling_that_names_no_distribution_is_refused(options: dict, smallest: float, found: str) -> None:
    with pytest.raises(ContractError, match=f"found {found}; expected a temperature"):
        check_sampling(SamplingParams(**options), smallest)


def test_temperatures_that_a_sampler_takes_are_left_alone() -> None:
    for temperature, smallest in ((0.0, 1e-5), (1e-7, 0.0), (1e-5, 1e-5)):
        check_sampling(SamplingParams(temperature=temperature), smallest)


def test_limits_are_those_of_the_sample_and_of_the_sequence() -> None:
    assert sample_limits(request_of([3, 9], 2), 12, 50).tolist() == [8, 8, 3, 3]
    with pytest.raises(ContractError, match="ids from 0 to 2; .* 0 to 1"):
        sample_limits(request_of([3], 1), 12, 2)


def sample_of(number: int, length: int, experts: np.ndarray | None = None) -> FinishedSample:
    """A sample whose tokens are its number."""
    return FinishedSample(
        number=number,
        tokens=np.full(length, number, np.int32),
        logprobs=np.full(length, -number, np.float32),
        weight_versions=np.full(length, 4, np.int32),
        finish_reason=FinishReason.LENGTH if length else FinishReason.ABORTED,
        routed_experts=experts,
    )


def test_samples_are_joined_in_the_order_of_their_numbers() -> None:
    result = join_samples([sample_of(2, 1), sample_of(0, 3), sample_of(1, 0)])
    assert result.tokens.tolist() == [0, 0, 0, 2]
    assert result.logprobs.tolist() == [0.0, 0.0, 0.0, -2.0]
    assert result.weight_versions.tolist() == [4] * 4
    assert result.offsets.tolist() == [0, 3, 3, 4]
    assert result.finish_reasons.tolist() == [FinishReason.LENGTH, FinishReason.ABORTED, FinishReason.LENGTH]
    assert result.routed_experts is None


def test_experts_are_joined_and_those_of_samples_without_any_are_unknown() -> None:
    first, last = np.full((3, 2, 4), 7, np.int16), np.full((1, 2, 4), 5, np.int16)
    samples = [sample_of(2, 1, last), sample_of(0, 2, first), sample_of(1, 0, np.zeros((2, 0, 0), np.int16))]
    routed = join_samples(samples, routed_experts=True).routed_experts
    assert routed is not None
    assert routed.offsets.tolist() == [0, 3, 5, 6]
    assert routed.experts[:, 0, 0].tolist() == [7, 7, 7, -1, -1, 5]
    assert (routed.experts.shape, routed.experts.dtype) == ((6, 2, 4), np.int16)


def test_no_samples_are_joined_to_none() -> None:
    result = join_samples([], routed_experts=True)
    assert result.offsets.tolist() == [0]
    assert (len(result.tokens), result.tokens.dtype) == (0, np.int32)
    assert result.routed_experts is not None
    assert result.routed_experts.offsets.tolist() == [0]


def test_splitmix64_is_the_published_generator() -> None:
    """The first three numbers for the seed 1234567, as the reference implementation prints them."""
    increment = 0x9E3779B97F4A7C15
    states = np.asarray([(1234567 + step * increment) % 2**64 for step in range(3)], np.uint64)
    assert splitmix64(states).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]
