"""Requests that join while others run: none of them notices, and what is cut is the beginning of what it would have been."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from attrs import define, evolve, field
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.spi import (
    CloseRequest,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    NonFiniteError,
    SetResidencyRequest,
    StreamRequest,
)
from rlcore_transformers.cache import SlotCache

SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"top_k": 6, "temperature": 1.4},
    {"top_p": 0.9, "stop_token_ids": (4, 5, 6)},
    {"stop_strings": ("e", "ab")},
    {"stop_strings": ("t.", "s"), "stop_token_ids": (3,), "temperature": 0.7},
]


@define(eq=False)
class TimedFeed:
    """Gives each request at a step of the generation, and ends at one, or once there is nothing left to do."""

    requests: Sequence[tuple[int, GenerateRequest]]
    """(step, request), ascending."""
    end_at: int | None = None
    step: int = 0
    num_taken: int = 0
    delivered: dict[int, tuple[GenerateResult, int]] = field(factory=dict)
    """By number: the result that it came in, and its row there."""

    def take(self, *, wait: bool) -> Sequence[GenerateRequest] | None:
        waiting = self.requests[self.num_taken :]
        self.step = max(self.step + 1, waiting[0][0] if wait and waiting else 0)
        if (self.end_at is not None and self.step > self.end_at) or (wait and not waiting):
            return None
        due = [request for step, request in waiting if step <= self.step]
        self.num_taken += len(due)
        return due

    def deliver(self, samples: Any, result: GenerateResult) -> None:
        for row, number in enumerate(samples.tolist()):
            assert number not in self.delivered
            self.delivered[number] = result, row

    def end(self) -> None:
        raise AssertionError("nothing is wrong")

    def sample(self, number: int) -> "tuple[list[int], Any, int, Any]":
        """Tokens, log-probabilities, finish reason and experts of a sample."""
        return part_of(*self.delivered[number])


def part_of(result: GenerateResult, row: int) -> "tuple[list[int], Any, int, Any]":
    part = slice(result.offsets[row], result.offsets[row + 1])
    routed = result.routed_experts
    experts = None if routed is None else routed.experts[routed.offsets[row] : routed.offsets[row + 1]]
    return result.tokens[part].tolist(), result.logprobs[part], int(result.finish_reasons[row]), experts


def check_stream(feed: TimedFeed, generate: Callable[[GenerateRequest], GenerateResult]) -> int:
    """Every sample is that of its request alone, or the beginning of it where it was cut; returns how many were cut."""
    number, num_cut = 0, 0
    for _, request in feed.requests[: feed.num_taken]:
        alone = generate(request)
        for row in range(len(request.seeds)):
            tokens, logprobs, reason, experts = feed.sample(number)
            whole, expected, whole_reason, whole_experts = part_of(alone, row)
            was_cut = reason == FinishReason.ABORTED
            assert tokens == (whole[: len(tokens)] if was_cut else whole)
            assert was_cut or reason == whole_reason
            np.testing.assert_allclose(logprobs, expected[: len(tokens)], atol=1e-4)
            assert (experts is None) == (not request.routed_experts)
            if experts is not None:
                prompt = int(request.prompts.lengths[row // request.num_samples])
                assert len(experts) == prompt + len(tokens)
                # The last token's are not known, nor those of a prompt that never went through the model.
                known = len(experts) - 1 if tokens else (prompt if (experts[0] >= 0).any() else 0)
                np.testing.assert_array_equal(experts[:known], whole_experts[:known])
            number, num_cut = number + 1, num_cut + was_cut
    assert sorted(feed.delivered) == list(range(number))
    return num_cut


def timed_requests(tools, requests, seed, **changes):
    """Requests from (step, prompts' lengths, samples of each, sampling), with prompts, seeds and limits drawn."""
    random = np.random.default_rng(seed)
    timed = []
    for step, lengths, num_samples, sampling in sorted(requests, key=lambda request: request[0]):
        count = len(lengths) * num_samples
        request = tools.make_request(
            [random.integers(2, 20, length).tolist() for length in lengths],
            num_samples=num_samples,
            seeds=random.integers(0, 2**62, count),
            max_tokens=random.integers(1, 30, count),
            **SAMPLINGS[sampling],
        )
        timed.append((step, evolve(request, **changes)))
    return timed


REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 25),
        st.lists(st.integers(1, 40), max_size=3),
        st.integers(0, 3),
        st.integers(0, len(SAMPLINGS) - 1),
    ),
    min_size=1,
    max_size=5,
)


@pytest.fixture(scope="module")
def streaming(tools, qwen3):
    """Generators whose caches are of different sizes at most; the last prefills prompts one by one."""
    by_size = {size: tools.make_backend(qwen3, max_batch_size=size) for size in (1, 3, 64)}
    return by_size | {"short prefill": tools.make_backend(qwen3, max_prefill_tokens=1)}


@settings(deadline=None, max_examples=40)
@given(
    requests=REQUESTS,
    backend=st.sampled_from([1, 3, 64, "short prefill"]),
    end_at=st.none() | st.integers(0, 40),
    is_fresh=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_any_interleaving_gives_the_samples_of_each_request_alone(
    tools, streaming, qwen3_backend, requests, backend, end_at, is_fresh, seed
):
    feed = TimedFeed(timed_requests(tools, requests, seed), end_at)
    if is_fresh:  # so that the cache grows while samples are in it
        streaming[backend]._cache = None
    streaming[backend].stream(StreamRequest(feed=feed, weight_version=0))
    assert feed.num_taken == len(requests) or end_at is not None
    assert check_stream(feed, qwen3_backend.generate) == 0 or end_at is not None


@settings(deadline=None, max_examples=15)
@given(requests=REQUESTS, end_at=st.none() | st.integers(0, 40), seed=st.integers(0, 2**32))
def test_experts_are_those_of_each_request_alone(tools, mixture, requests, end_at, seed):
    timed = timed_requests(tools, requests, seed, routed_experts=True)
    plain = [(step, evolve(request, routed_experts=index % 2 == 0)) for index, (step, request) in enumerate(timed)]
    feed = TimedFeed(plain, end_at)
    mixture.stream(StreamRequest(feed=feed, weight_version=0))
    check_stream(feed, mixture.generate)


@pytest.fixture(scope="module")
def mixture(tools, checkpoint):
    return tools.make_backend(checkpoint("qwen3_moe"), max_batch_size=4)


def test_a_cut_reaches_every_sample(tools, qwen3):
    """Those with a place, those whose prompt went through the model, and those whose request has not begun."""
    backend = tools.make_backend(qwen3, max_batch_size=3)
    long = tools.make_request(tools.random_prompts([9, 4]), num_samples=4, max_tokens=60)
    feed = TimedFeed([(0, long), (5, tools.make_request([[5]], max_tokens=9))], end_at=10)
    backend.stream(StreamRequest(feed=feed, weight_version=0))
    lengths = {number: len(feed.sample(number)[0]) for number in feed.delivered}
    assert sorted(lengths) == list(range(9))
    assert {feed.sample(number)[2] for number in lengths} == {FinishReason.ABORTED}
    assert [lengths[number] for number in sorted(lengths)].count(0) == 6
    assert set(lengths.values()) == {0, 10}
    assert check_stream(feed, tools.make_backend(qwen3).generate) == 9


def test_the_cache_grows_no_further_than_the_options_let_it(tools, qwen3, monkeypatch):
    """It is at least doubled where samples have to move, and never more places than `max_batch_size`."""
    made, initialise = [], SlotCache.__init__

    def initialising(self, num_slots, length):
        made.append((num_slots, length))
        initialise(self, num_slots, length)

    monkeypatch.setattr(SlotCache, "__init__", initialising)
    backend = tools.make_backend(qwen3, max_batch_size=7)
    requests = [(step, tools.make_request([[2] * 5], max_tokens=50, seeds=[step])) for step in range(2, 12)]
    late = tools.make_request([[3] * 20], max_tokens=60, seeds=[99])
    feed = TimedFeed([*requests, (13, late)])
    backend.stream(StreamRequest(feed=feed, weight_version=0))
    assert made == [(1, 55), (2, 64), (4, 64), (7, 64), (7, 96)]
    assert check_stream(feed, tools.make_backend(qwen3).generate) == 0
    made.clear()
    backend.generate(tools.make_request([[2] * 5], num_samples=7, max_tokens=90))
    assert made == []


def test_requests_that_come_at_once_get_a_cache_for_the_longest_of_them(tools, qwen3):
    """The later one needs more places, and each of them shorter."""
    long = tools.make_request([[2] * 20], max_tokens=90)
    short = tools.make_request(tools.random_prompts([3, 4, 5]), num_samples=2, max_tokens=4)
    feed = TimedFeed([(0, long), (0, short)])
    tools.make_backend(qwen3).stream(StreamRequest(feed=feed, weight_version=0))
    assert check_stream(feed, tools.make_backend(qwen3).generate) == 0


def test_kinds_of_sampling_are_forgotten_once_nothing_is_under_way(tools, qwen3):
    """So that a long stream of many kinds stays small."""
    backend = tools.make_backend(qwen3)
    with backend._generation(0) as generation:
        for temperature in (0.5, 0.6, 0.7):
            request = tools.make_request([[5]], max_tokens=2, temperature=temperature)
            generation.add(request, np.array([2]), lambda finished: None)
            while not generation.is_idle:
                generation.step()
        assert [sampling.temperature for sampling in generation._kinds] == [0.7]


def test_a_call_that_fails_leaves_no_cache_behind(tools, qwen3):
    """What it wrote may not be finite. A call beside another has a cache of its own."""
    backend = tools.make_backend(qwen3)
    expected = backend.generate(tools.make_request([[5, 6]]))
    with backend._generation(0) as generation:
        generation.add(tools.make_request([[5, 6]], max_tokens=9), np.array([9]), lambda finished: None)
        generation.step()
        assert backend.generate(tools.make_request([[5, 6]])).tokens.tolist() == expected.tokens.tolist()
        assert backend._cache is not generation.cache
    broken = {name: torch.full_like(tensor, float("nan")) for name, tensor in tools.checkpoint_tensors(qwen3).items()}
    tools.refit(backend, tools.make_export(broken))
    with pytest.raises(NonFiniteError):
        backend.stream(StreamRequest(feed=TimedFeed([(0, tools.make_request([[5, 6]]))]), weight_version=0))
    assert backend._cache is None
    tools.refit(backend, tools.make_export(tools.checkpoint_tensors(qwen3)))
    assert backend.generate(tools.make_request([[5, 6]])).tokens.tolist() == expected.tokens.tolist()
    backend.set_residency(SetResidencyRequest(weights="device", state="host"))
    assert backend._cache is None
    backend.close(CloseRequest())
