"""Continuous batching: what surrounds a sample does not change it, and every sample ends where it should."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.spi import ContractError, FinishReason
from rlcore_transformers.forward import FamilyDecoder

BATCH_SIZES = (1, 2, 3, 7, 64)


@pytest.fixture(scope="module")
def backends(tools, qwen3):
    """The same model with caches of different sizes; the last one prefills prompts one by one."""
    by_size = {size: tools.make_backend(qwen3, max_batch_size=size) for size in BATCH_SIZES}
    return by_size | {"short prefill": tools.make_backend(qwen3, max_prefill_tokens=1)}


def alone(tools, backend, prompt, seed, limit, sampling):
    """The sample as the only one of its request."""
    result = backend.generate(tools.make_request([prompt], max_tokens=[limit], seeds=[seed], **sampling))
    return result.tokens.tolist(), result.logprobs, result.finish_reasons.tolist()


@settings(deadline=None, max_examples=25)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    num_samples=st.integers(1, 4),
    backend=st.sampled_from([*BATCH_SIZES, "short prefill"]),
    sampling=st.sampled_from([{}, {"temperature": 0.0}, {"top_k": 6, "temperature": 1.4}, {"top_p": 0.9}]),
    stop=st.sampled_from([(), (3,), (4, 5, 6)]),
    seed=st.integers(0, 2**62),
)
def test_a_sample_depends_on_its_prompt_and_seed_alone(
    tools, backends, qwen3_backend, lengths, num_samples, backend, sampling, stop, seed
):
    generator = np.random.default_rng(seed)
    prompts = [generator.integers(2, 20, length).tolist() for length in lengths]
    count = len(prompts) * num_samples
    seeds, limits = generator.integers(0, 2**62, count), generator.integers(1, 30, count)
    request = tools.make_request(
        prompts, num_samples=num_samples, seeds=seeds, max_tokens=limits, stop_token_ids=stop, **sampling
    )
    result = backends[backend].generate(request)
    samples, logprobs = tools.split(result), tools.split(result, "logprobs")
    for number in range(count):
        prompt = prompts[number // num_samples]
        tokens, expected, reasons = alone(
            tools, qwen3_backend, prompt, seeds[number], limits[number], sampling | {"stop_token_ids": stop}
        )
        assert samples[number] == tokens
        assert result.finish_reasons[number] == reasons[0]
        np.testing.assert_allclose(logprobs[number], expected, atol=1e-4)


@settings(deadline=None, max_examples=10)
@given(order=st.permutations(range(6)), num_samples=st.integers(1, 2))
def test_the_order_of_prompts_does_not_matter(tools, backends, order, num_samples):
    prompts = tools.random_prompts([3, 17, 8, 8, 1, 30], seed=7)
    seeds = np.arange(6 * num_samples).reshape(6, num_samples)
    straight = backends[3].generate(tools.make_request(prompts, num_samples=num_samples, seeds=seeds.ravel()))
    shuffled = backends[3].generate(
        tools.make_request([prompts[index] for index in order], num_samples=num_samples, seeds=seeds[list(order)].ravel())
    )
    expected, found = tools.split(straight), tools.split(shuffled)
    groups = [expected[index * num_samples : (index + 1) * num_samples] for index in order]
    assert found == [sample for group in groups for sample in group]


def test_a_cut_sample_continues_from_where_it_was(tools, qwen3_backend):
    prompt = tools.random_prompts([9], seed=8)[0]
    whole = qwen3_backend.generate(tools.make_request([prompt], max_tokens=20, seeds=[5])).tokens.tolist()
    start = qwen3_backend.generate(tools.make_request([prompt], max_tokens=8, seeds=[5])).tokens.tolist()
    rest = qwen3_backend.generate(tools.make_request([prompt + start], max_tokens=12, seeds=[5])).tokens.tolist()
    assert start + rest == whole


def test_samples_of_one_prompt_differ_and_seeds_repeat(tools, qwen3_backend):
    prompt = tools.random_prompts([5])[0]
    samples = tools.split(qwen3_backend.generate(tools.make_request([prompt], num_samples=16)))
    assert len({tuple(sample) for sample in samples}) == 16
    again = tools.split(qwen3_backend.generate(tools.make_request([prompt], num_samples=16)))
    assert again == samples
    same = tools.split(qwen3_backend.generate(tools.make_request([prompt], num_samples=4, seeds=[9, 9, 9, 9])))
    assert same == [same[0]] * 4


def test_a_prompt_is_prefilled_once_for_all_its_samples(tools, qwen3, monkeypatch):
    backend = tools.make_backend(qwen3, max_batch_size=3)
    rows, forward = [], FamilyDecoder.forward
    monkeypatch.setattr(
        FamilyDecoder, "forward", lambda self, tokens, *others: rows.append(len(tokens)) or forward(self, tokens, *others)
    )
    result = backend.generate(tools.make_request([[2] * 50, [3] * 50], num_samples=5, max_tokens=4))
    assert [count for count in rows if count > 3] == [100]
    assert sum(count for count in rows if count <= 3) == 10 * 3
    assert np.diff(result.offsets).tolist() == [4] * 10


def test_limits_hold_for_each_sample(tools, qwen3_backend):
    limits = [1, 7, 3, 20, 2, 5]
    result = qwen3_backend.generate(tools.make_request(tools.random_prompts([4, 6]), num_samples=3, max_tokens=limits))
    assert np.diff(result.offsets).tolist() == limits
    assert set(result.finish_reasons.tolist()) == {FinishReason.LENGTH}
    assert result.weight_versions.tolist() == [0] * sum(limits)


def test_a_stop_token_is_the_last(tools, qwen3_backend):
    prompts = tools.random_prompts([4, 6], seed=9)
    free = tools.split(qwen3_backend.generate(tools.make_request(prompts, num_samples=6, max_tokens=25)))
    stops = (4,)
    result = qwen3_backend.generate(tools.make_request(prompts, num_samples=6, max_tokens=25, stop_token_ids=(*stops, 10**6)))
    reasons = set()
    for number, (sample, whole) in enumerate(zip(tools.split(result), free, strict=True)):
        first = next((index for index, token in enumerate(whole) if token in stops), None)
        assert sample == (whole if first is None else whole[: first + 1])
        expected = FinishReason.LENGTH if first is None else FinishReason.STOP
        assert result.finish_reasons[number] == expected
        reasons.add(expected)
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}


def test_a_stop_token_at_the_limit_counts_as_stop(tools, qwen3_backend):
    free = qwen3_backend.generate(tools.make_request([[5, 6]], max_tokens=4)).tokens.tolist()
    assert free[3] not in free[:3]
    result = qwen3_backend.generate(tools.make_request([[5, 6]], max_tokens=4, stop_token_ids=(free[3],)))
    assert result.tokens.tolist() == free
    assert result.finish_reasons.tolist() == [FinishReason.STOP]


def test_the_sequence_limit_ends_a_sample(tools, qwen3):
    backend = tools.make_backend(qwen3, max_length=20)
    result = backend.generate(tools.make_request([[2] * 15, [3] * 19], num_samples=2, max_tokens=50))
    assert np.diff(result.offsets).tolist() == [5, 5, 1, 1]
    assert set(result.finish_reasons.tolist()) == {FinishReason.LENGTH}


@pytest.mark.parametrize("strings", [("e",), ("ab", "ca", "qz"), ("t.", "e n", "s")], ids=str)
def test_a_stop_string_may_span_tokens(tools, qwen3, qwen3_backend, strings):
    """Characters are tokens here, so a longer string spans several; the reference searches the whole decoded text."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(qwen3)
    prompts = tools.random_prompts([4, 8, 2, 5], seed=10)
    free = tools.split(qwen3_backend.generate(tools.make_request(prompts, num_samples=10, max_tokens=60)))
    result = qwen3_backend.generate(tools.make_request(prompts, num_samples=10, max_tokens=60, stop_strings=strings))
    num_stopped = 0
    for number, (sample, whole) in enumerate(zip(tools.split(result), free, strict=True)):
        ends = [n for n in range(1, len(whole) + 1) if any(s in tokenizer.decode(whole[:n]) for s in strings)]
        assert sample == (whole[: ends[0]] if ends else whole)
        assert result.finish_reasons[number] == (FinishReason.STOP if ends else FinishReason.LENGTH)
        num_stopped += bool(ends)
    assert num_stopped > 0


def test_no_prompts_give_no_samples(tools, qwen3_backend):
    result = qwen3_backend.generate(tools.make_request([]))
    assert result.offsets.tolist() == [0]
    assert len(result.tokens) == 0


@pytest.mark.parametrize(
    ("prompts", "sampling", "message"),
    [
        ([[2, 500]], {}, "expected ids from 0 to"),
        ([[2, -1]], {}, "expected ids from 0 to"),
        ([[2]], {"temperature": -1.0}, "temperature = -1.0"),
        ([[2]], {"temperature": float("nan")}, "temperature = nan"),
        ([[2]], {"top_k": -3}, "top_k = -3"),
        ([[2]], {"top_p": 0.0}, "top_p = 0.0"),
        ([[2]], {"stop_strings": ("",)}, "no empty stop string"),
    ],
)
def test_requests_that_cannot_be_met_are_refused(tools, qwen3_backend, prompts, sampling, message):
    with pytest.raises(ContractError, match=message):
        qwen3_backend.generate(tools.make_request(prompts, **sampling))
