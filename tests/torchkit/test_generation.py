"""What generators refuse of a request, and where samples end."""

import numpy as np
import pytest

from rlcore.spi import ContractError, GenerateRequest, RaggedTokens, SamplingParams
from rlcore_torchkit.generation import check_sampling, sample_limits, splitmix64


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
    with pytest.raises(ContractError, match="token ids from 0 to 2; expected ids from 0 to 1"):
        sample_limits(request_of([3], 1), 12, 2)


def test_splitmix64_is_the_published_generator() -> None:
    """The first three numbers for the seed 1234567, as the reference implementation prints them."""
    increment = 0x9E3779B97F4A7C15
    states = np.asarray([(1234567 + step * increment) % 2**64 for step in range(3)], np.uint64)
    assert splitmix64(states).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]
