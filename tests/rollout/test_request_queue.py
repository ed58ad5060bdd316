"""The feed between what asks for samples, in any thread, and the generator that streams them."""

import threading

import numpy as np
import pytest
from attrs import evolve

from rlcore.spi import (
    FinishReason,
    GenerateRequest,
    GenerateResult,
    GeneratorContext,
    ModelSpec,
    RaggedTokens,
    RankInfo,
    RoutedExperts,
    SamplingParams,
    StreamRequest,
)
from rlcore.spi.execution import Responses
from rlcore.testing.fakes import FakeTokenizer
from rlcore.testing.fakes.generator import FakeGenerator, FakeGeneratorConfig
from rlcore.testing.fakes.policy import make_weights
from rlcore.testing.fakes.tokenizer import VOCABULARY_SIZE
from rlcore_rollout import episode
from rlcore_rollout.episode import CompletionRequest
from rlcore_rollout.request_queue import RequestQueue

WARM, COLD = SamplingParams(), SamplingParams(temperature=0.5)
FIRST, SECOND = np.array([1, 2, 3], np.int32), np.array([4], np.int32)


def wanted(prompt, *owners, sampling=WARM, routed_experts=False, goes_on=False):
    """A sample for each owner; its seed is the owner's number, and its limit too."""
    return [
        CompletionRequest(
            prompt=prompt,
            seed=owner,
            max_tokens=owner + 1,
            sampling=sampling,
            owner=owner,
            routed_experts=routed_experts,
            goes_on=goes_on,
        )
        for owner in owners
    ]


def responses_of(*lengths, routed=None):
    """Samples whose tokens are their row, with their row as text too."""
    offsets = np.cumsum([0, *lengths])
    tokens = np.repeat(np.arange(len(lengths)), lengths).astype(np.int32)
    result = GenerateResult(
        tokens=tokens,
        offsets=offsets,
        logprobs=-tokens.astype(np.float32),
        weight_versions=tokens + np.int32(7),
        finish_reasons=np.array([FinishReason.LENGTH if length else FinishReason.ABORTED for length in lengths], np.uint8),
        routed_experts=routed,
    )
    return Responses(result=result, texts=[f"text {row}" for row in range(len(lengths))])


@pytest.fixture
def handed():
    """Everything that was handed out, in order."""
    return []


@pytest.fixture
def feed(handed):
    feed = RequestQueue(handed.extend)
    feed.begin(5)
    return feed


def seeds(requests):
    return [request.seeds.tolist() for request in requests]


def test_conversations_go_with_their_samples(feed):
    feed.ask([evolve(one, conversation=7) for one in wanted(FIRST, 0)] + wanted(SECOND, 1))
    feed.ask(wanted(FIRST, 2, 3))
    known, unknown = feed.take(wait=True)
    assert (known.conversations.tolist(), unknown.conversations) == ([7, -1], None)


def test_the_images_of_a_prompt_go_with_it(feed):
    shown = [evolve(one, images=(b"a", b"b")) for one in wanted(FIRST, 1, 2)]
    feed.ask([*shown, *wanted(SECOND, 3, 4)])
    feed.begin(0)
    (request,) = feed.take(wait=False)
    assert request.images == ((b"a", b"b"), ())
    feed.ask(wanted(SECOND, 5))
    assert feed.take(wait=False)[0].images is None


def test_what_waits_is_one_request_a_kind_of_sampling(feed):
    feed.ask(wanted(FIRST, 0, 1) + wanted(SECOND, 2, 3) + wanted(FIRST, 4, 5, sampling=COLD) + wanted(SECOND, 6))
    pairs, cold, single = feed.take(wait=True)
    assert seeds([pairs, cold, single]) == [[0, 1, 2, 3], [4, 5], [6]]
    assert [pairs.prompts.sequence(index).tolist() for index in range(2)] == [FIRST.tolist(), SECOND.tolist()]
    assert [request.num_samples for request in (pairs, cold, single)] == [2, 2, 1]
    assert [request.sampling for request in (pairs, cold, single)] == [WARM, COLD, WARM]
    assert pairs.max_tokens.tolist() == [1, 2, 3, 4]
    assert {request.weight_version for request in (pairs, cold, single)} == {5}
    assert feed.take(wait=False) == []


def test_a_prompt_is_shared_by_the_samples_of_one_array_that_are_adjacent(feed):
    """Equal tokens elsewhere are another prompt; experts are wanted of a whole request or of none of it."""
    same = FIRST.copy()
    feed.ask(wanted(FIRST, 0) + wanted(same, 1) + wanted(SECOND, 2) + wanted(FIRST, 3, 4, routed_experts=True))
    single, routed = feed.take(wait=True)
    assert (single.seeds.tolist(), single.num_samples, single.routed_experts) == ([0, 1, 2], 1, False)
    assert (routed.seeds.tolist(), routed.num_samples, routed.routed_experts) == ([3, 4], 2, True)
    feed.ask(wanted(FIRST, 5) + wanted(FIRST, 6, routed_experts=True))
    assert [(one.seeds.tolist(), one.routed_experts) for one in feed.take(wait=True)] == [([5], False), ([6], True)]


def test_what_goes_on_comes_before_what_has_not_begun_in_the_next_stream(feed):
    feed.ask(wanted(FIRST, 0, 1) + wanted(SECOND, 2, goes_on=True) + wanted(FIRST, 3) + wanted(SECOND, 4, goes_on=True))
    feed.end()
    feed.begin(6)
    going_on, begin = feed.take(wait=True)
    assert (going_on.seeds.tolist(), begin.seeds.tolist()) == ([2, 4], [0, 1, 3])


def test_samples_are_handed_to_those_who_asked_as_they_come(feed, handed):
    feed.ask(wanted(FIRST, 10, 11))
    feed.take(wait=True)
    feed.ask(wanted(SECOND, 12))
    feed.take(wait=True)
    assert feed.num_outstanding == 3
    feed.deliver(np.array([2]), responses_of(3))
    feed.deliver(np.array([1, 0]), responses_of(0, 2))
    assert feed.num_outstanding == 0
    assert [one.request.owner for one in handed] == [12, 11, 10]
    assert [one.tokens.tolist() for one in handed] == [[0, 0, 0], [], [1, 1]]
    assert [one.text for one in handed] == ["text 0", "text 0", "text 1"]
    assert [one.finish_reason for one in handed] == [FinishReason.LENGTH, FinishReason.ABORTED, FinishReason.LENGTH]
    assert handed[2].logprobs.tolist() == [-1.0, -1.0]
    assert handed[2].weight_versions.tolist() == [8, 8]
    assert handed[2].routed_experts is None
    with pytest.raises(ValueError, match="read-only"):
        handed[2].tokens[0] = 5  # an environment sees what will be trained on


def test_what_cannot_be_handed_out_is_owed_all_the_same(feed, handed, monkeypatch):
    feed.begin(0)
    feed.ask(wanted(FIRST, 0, 1))
    feed.take(wait=False)

    def no_memory(**_):
        raise MemoryError

    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr(episode, "Completion", no_memory)
        feed.deliver(np.array([0, 1]), responses_of(1, 2))
    assert (handed, feed.num_outstanding) == ([], 2)
    feed.deliver(np.array([0, 1]), responses_of(1, 2))
    assert (len(handed), feed.num_outstanding) == (2, 0)


def test_experts_are_those_of_each_sample(feed, handed):
    feed.ask(wanted(SECOND, 0, 1, routed_experts=True))
    feed.take(wait=True)
    experts = np.arange(5, dtype=np.int16)[:, None, None]
    feed.deliver(np.array([0, 1]), responses_of(1, 2, routed=RoutedExperts(experts=experts, offsets=np.array([0, 2, 5]))))
    assert [one.routed_experts.ravel().tolist() for one in handed] == [[0, 1], [2, 3, 4]]


def test_a_generator_that_waits_is_woken_by_a_request_and_by_the_end(feed):
    taken, all_taken = [], threading.Event()

    def work():
        while (requests := feed.take(wait=True)) is not None:
            taken.extend(seeds(requests))
            if sum(map(len, taken)) == 3:
                all_taken.set()

    generator = threading.Thread(target=work)
    generator.start()
    for owner in range(3):
        feed.ask(wanted(FIRST, owner))
    assert all_taken.wait(300)
    feed.end()
    generator.join(300)
    assert not generator.is_alive()
    assert [seed for part in taken for seed in part] == [0, 1, 2]


def test_what_waits_goes_on_waiting_at_the_end_of_a_stream(feed):
    feed.ask(wanted(FIRST, 0))
    feed.end()
    assert feed.take(wait=True) is None
    assert feed.take(wait=False) is None
    feed.ask(wanted(SECOND, 1))
    feed.begin(8)
    (request,) = feed.take(wait=True)
    assert (request.seeds.tolist(), request.weight_version) == ([0, 1], 8)


def test_what_a_stream_that_failed_owes_is_asked_for_again_before_all_else(feed, handed):
    feed.ask(wanted(FIRST, 0, 1, 2))
    feed.take(wait=True)
    feed.ask(wanted(SECOND, 3))
    feed.take(wait=True)
    feed.deliver(np.array([1]), responses_of(1))
    feed.ask(wanted(SECOND, 4))
    feed.end()
    assert feed.requeue() == 3
    assert feed.num_outstanding == 4
    feed.begin(9)
    (request,) = feed.take(wait=True)
    assert (request.seeds.tolist(), request.num_samples) == ([0, 2, 3, 4], 2)
    feed.deliver(np.array([0, 1, 2, 3]), responses_of(1, 1, 1, 1))
    assert [one.request.owner for one in handed] == [1, 0, 2, 3, 4]
    assert feed.num_outstanding == 0


class WithTexts:
    """A request feed as a generator's, in one process."""

    def __init__(self, feed):
        self.requests, self.take, self.end = feed, feed.take, feed.end

    def deliver(self, samples, result):
        self.requests.deliver(samples, Responses.of(result, FakeTokenizer()))


def test_many_threads_ask_a_generator_that_streams():
    """Each asks for its next sample once it has the last one, and gets what its request alone would have given."""
    num_threads, num_turns = 4, 6
    context = GeneratorContext(model=ModelSpec(path="fake"), rank_info=RankInfo(), seed=0, max_sequence_length=40)
    generator = FakeGenerator(context, FakeGeneratorConfig())
    generator.take(make_weights(VOCABULARY_SIZE, 0, 1.0), 0)
    got = [threading.Event() for _ in range(num_threads)]
    found = {}

    def on_completions(samples):
        for one in samples:
            thread, turn = one.request.owner
            found[thread, turn] = one
            got[thread].set()

    feed = RequestQueue(on_completions)
    feed.begin(0)

    def ask(thread):
        for turn in range(num_turns):
            got[thread].clear()
            prompt = np.arange(1, 2 + thread, dtype=np.int32)
            sampling = COLD if thread % 2 else WARM
            seed = thread * 100 + turn
            feed.ask(
                [CompletionRequest(prompt=prompt, seed=seed, max_tokens=3 + turn, sampling=sampling, owner=(thread, turn))]
            )
            assert got[thread].wait(300)

    threads = [threading.Thread(target=ask, args=(thread,)) for thread in range(num_threads)]
    stream = threading.Thread(target=generator.stream, args=(StreamRequest(feed=WithTexts(feed), weight_version=0),))
    for one in (stream, *threads):
        one.start()
    for one in threads:
        one.join(300)
    feed.end()
    stream.join(300)
    assert len(found) == num_threads * num_turns
    for one in found.values():
        alone = generator.generate(
            GenerateRequest(
                prompts=RaggedTokens.from_lists([one.request.prompt.tolist()]),
                num_samples=1,
                seeds=np.array([one.request.seed]),
                max_tokens=np.array([one.request.max_tokens], np.int32),
                sampling=one.request.sampling,
                weight_version=0,
            )
        )
        assert one.tokens.tolist() == alone.tokens.tolist()
        assert one.text == FakeTokenizer().decode(one.tokens)
