"""Checks of streams: requests that join while others run, samples as they end, and what has not ended at the stream's end."""

from collections.abc import Callable

import numpy as np
import pytest
from attrs import evolve

from rlcore.spi import FinishReason, GenerateRequest, GenerateResult, SamplingParams, StreamRequest, capabilities
from rlcore.spi.arrays import offsets_of
from rlcore_conformance.generators.feeds import ScriptedFeed
from rlcore_conformance.generators.generator_fixtures import (
    MAX_SEQUENCE_LENGTH,
    PLAIN,
    GeneratorFixtures,
    GeneratorUnderTest,
    Question,
    WeightSets,
    load_reference,
    make_question,
)
from rlcore_conformance.generators.generator_streaming import ATTEMPTS, assert_tokens_follow_refits
from rlcore_conformance.references.reference import Reference, ReferencePolicy

COLD = SamplingParams(temperature=0.5)
NUM_SAMPLES = (2, 4, 8, 12)
"""Samples of each prompt in the attempts, one after another and over again. Few are over before a server has taken a later
request, and many keep a busy one from taking it."""


class GeneratorContinuous(GeneratorFixtures):
    """The hook `stream`."""

    def test_requests_join_a_stream_that_runs(
        self, generator: GeneratorUnderTest, reference: Reference, policy: ReferencePolicy
    ) -> None:
        """A request that comes late is under way beside one that began before, and every sample is that of its own request."""
        generator.require(capabilities.CONTINUOUS)
        late = with_limits(make_question(reference.vocab_size, num_samples=1), [1] * 5)
        # A busy machine may bring the later request after all others have ended; a generator that lets it wait always does.
        for attempt in range(ATTEMPTS):
            question = make_question(reference.vocab_size, num_samples=NUM_SAMPLES[attempt % len(NUM_SAMPLES)])
            count = len(question.seeds)
            long = with_limits(question, [1, *[MAX_SEQUENCE_LENGTH] * (count - 1)])
            feed = with_a_late_request(generator, long, late)
            assert sorted(feed.delivered) == list(range(count + 5)), "expected every sample, each once"
            generator.assert_logprobs(policy, long, joined(feed, 0, count))
            generator.assert_logprobs(policy, late, joined(feed, count, 5), COLD)
            order = list(feed.delivered)
            last_long, last_late = (max(map(order.index, part)) for part in (range(count), range(count, count + 5)))
            if last_late < last_long:
                return
        pytest.fail("a request that came later ended after one of longer samples: it had to wait for it")

    def test_a_stream_that_ends_hands_out_what_has_not(
        self, generator: GeneratorUnderTest, policy: ReferencePolicy, question: Question
    ) -> None:
        """Samples that have not ended come as ABORTED with the tokens so far, and the generator is free afterwards."""
        generator.require(capabilities.CONTINUOUS)
        long = with_limits(question, [1, *[MAX_SEQUENCE_LENGTH] * (len(question.seeds) - 1)])
        cut = []
        for _ in range(ATTEMPTS):  # all may have ended before a busy machine ends the stream
            feed = stream(generator, ScriptedFeed(first=[long.request(PLAIN, 0)], then=lambda: None))
            assert sorted(feed.delivered) == list(range(len(long.seeds))), "expected every sample, each once"
            cut = [one for one in feed.delivered.values() if one.finish_reason == FinishReason.ABORTED]
            if any(len(one.tokens) for one in cut):
                break
        assert cut, "no sample was cut: the stream went on after its end"
        assert any(len(one.tokens) for one in cut), "no sample that was cut has the tokens that it had come to"
        generator.assert_logprobs(policy, long, joined(feed, 0, len(long.seeds)))
        if generator.handle.has(capabilities.PER_SAMPLE_SEEDS):
            whole = generator.generate(long)
            for number, one in feed.delivered.items():
                expected = whole.tokens[whole.offsets[number] : whole.offsets[number + 1]]
                assert one.tokens.tolist() == expected[: len(one.tokens)].tolist(), f"sample {number} was changed by the cut"
        generator.assert_logprobs(policy, question, generator.generate(question))

    def test_weights_change_while_a_stream_runs(
        self, generator: GeneratorUnderTest, reference: Reference, weights: WeightSets, question: Question
    ) -> None:
        """A stream goes on over a refit in flight, and tokens after it are those of the new weights."""
        generator.require(capabilities.CONTINUOUS)
        generator.require(capabilities.IN_FLIGHT_REFIT)
        policies = [load_reference(reference, one) for one in weights]
        assert_tokens_follow_refits(
            generator, question, policies, lambda version: generator.refit(weights[version % 2], version), streamed
        )


def with_limits(question: Question, limits: list[int]) -> Question:
    """The question with other limits."""
    return evolve(question, max_tokens=np.array(limits, np.int32))


def stream(generator: GeneratorUnderTest, feed: ScriptedFeed, weight_version: int = 0) -> ScriptedFeed:
    """Run a stream to its end; the feed then holds what was delivered."""
    generator.handle.stream(StreamRequest(feed=feed, weight_version=weight_version))
    return feed


def streamed(generator: GeneratorUnderTest, question: Question, version: int, then: Callable[[], None]) -> GenerateResult:
    """A SampleAndCall by a stream."""

    def nothing_more() -> list[GenerateRequest]:
        then()
        return []

    feed = stream(generator, ScriptedFeed(first=[question.request(PLAIN, version)], then=nothing_more), version)
    return joined(feed, 0, len(question.seeds))


def with_a_late_request(generator: GeneratorUnderTest, long: Question, late: Question) -> ScriptedFeed:
    """Run a stream whose second request, sampled COLD, comes once a sample of the first has ended."""
    waiting = [late.request(COLD, 0)]

    def then() -> list[GenerateRequest]:
        return [waiting.pop()] if waiting else []

    return stream(generator, ScriptedFeed(first=[long.request(PLAIN, 0)], then=then))


def joined(feed: ScriptedFeed, first: int, count: int) -> GenerateResult:
    """The samples from number `first` on as one result."""
    samples = [feed.delivered[number] for number in range(first, first + count)]
    return GenerateResult(
        tokens=np.concatenate([one.tokens for one in samples]),
        offsets=offsets_of([len(one.tokens) for one in samples]),
        logprobs=np.concatenate([one.logprobs for one in samples]),
        weight_versions=np.concatenate([one.weight_versions for one in samples]),
        finish_reasons=np.array([one.finish_reason for one in samples], np.uint8),
    )
