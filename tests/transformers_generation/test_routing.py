"""Experts collected token by token, against a table of what was said of each."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.spi import GenerateRequest, RaggedTokens, SamplingParams
from rlcore_transformers.jobs import Routing

SHAPE = (2, 3)
"""Layers, and experts of a token."""


def make_request(prompt_lengths, num_samples):
    count = len(prompt_lengths) * num_samples
    return GenerateRequest(
        prompts=RaggedTokens.from_lists([[2] * length for length in prompt_lengths]),
        num_samples=num_samples,
        seeds=np.arange(count),
        max_tokens=np.full(count, 9, np.int32),
        sampling=SamplingParams(),
        weight_version=0,
    )


@settings(max_examples=40)
@given(
    prompt_lengths=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    num_samples=st.integers(1, 3),
    seed=st.integers(0, 10**6),
)
def test_each_sample_has_the_experts_of_its_prompt_and_of_its_own_tokens(prompt_lengths, num_samples, seed):
    random = np.random.default_rng(seed)
    count = len(prompt_lengths) * num_samples
    limits = random.integers(1, 5, count)
    lengths = random.integers(1, limits + 1)
    routing = Routing(make_request(prompt_lengths, num_samples), limits, SHAPE)
    expected = {}
    order = random.permutation(len(prompt_lengths))
    for prompts in np.split(order, [len(order) // 2]):
        longest = max([prompt_lengths[prompt] for prompt in prompts], default=0)
        experts = random.integers(0, 99, (len(prompts), longest, *SHAPE)).astype(np.int16)
        routing.add_prompts(prompts, experts)
        for prompt, rows in zip(prompts, experts, strict=True):
            for sample in range(prompt * num_samples, (prompt + 1) * num_samples):
                expected |= {(sample, position): rows[position] for position in range(prompt_lengths[prompt])}
    whole = np.repeat(prompt_lengths, num_samples) + lengths
    for step in range(int(limits.max()) - 1):  # the last token of a sample goes through no layer
        samples = random.permutation(np.flatnonzero(step < lengths - 1))
        positions = np.repeat(prompt_lengths, num_samples)[samples] + step
        experts = random.integers(0, 99, (len(samples), *SHAPE)).astype(np.int16)
        routing.add_tokens(samples, positions, experts)
        expected |= dict(zip(zip(samples, positions, strict=True), experts, strict=True))
    nothing = np.full(SHAPE, -1)
    for sample in range(count):
        found = routing.result(sample, int(lengths[sample]))
        assert (found.shape, found.dtype) == ((whole[sample], *SHAPE), np.int16)
        for position in range(whole[sample]):
            np.testing.assert_array_equal(found[position], expected.get((sample, position), nothing))
