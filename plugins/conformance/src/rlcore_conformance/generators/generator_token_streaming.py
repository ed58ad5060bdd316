"""Checks of readers, which get tokens as a generator samples them and may end a sample."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import pytest
from attrs import define, evolve, field

from rlcore.spi import FinishReason, SamplingParams, TokenReader, capabilities
from rlcore.spi.arrays import Int32Array
from rlcore_conformance.generators.feeds import ScriptedFeed
from rlcore_conformance.generators.generator_continuous import stream, with_limits
from rlcore_conformance.generators.generator_fixtures import (
    MAX_SEQUENCE_LENGTH,
    PLAIN,
    GeneratorFixtures,
    GeneratorUnderTest,
    Question,
    assert_same_samples,
    samples_of,
)
from rlcore_conformance.references.reference import ReferencePolicy, log_softmax, sampling_distribution

NUM_LOGPROBS = 3
CASES = {
    "plain": (PLAIN, ()),
    "greedy": (SamplingParams(temperature=0.0), ()),
    "top_k": (SamplingParams(temperature=0.7, top_k=4), (capabilities.TOP_K,)),
}


@define(kw_only=True, eq=False)
class Reading:
    """The tokens that one sample's reader got."""

    tokens: list[int] = field(factory=list)
    logprobs: list[Mapping[int, float]] = field(factory=list)
    num_calls: int = 0
    then: Callable[[], None] = lambda: None
    """Called behind each call."""

    def take(self, first: int, tokens: Sequence[int], logprobs: Sequence[Mapping[int, float]]) -> None:
        """See TokenReader.on_tokens."""
        assert first == len(self.tokens), f"found tokens from {first} on; expected {len(self.tokens)}, behind those before"
        self.tokens += tokens
        self.logprobs += logprobs
        self.num_calls += 1
        self.then()


class GeneratorTokenStreaming(GeneratorFixtures):
    """GenerateRequest.readers."""

    @pytest.mark.parametrize("name", CASES)
    def test_readers_get_their_prompts_logprobs(
        self, generator: GeneratorUnderTest, policy: ReferencePolicy, question: Question, name: str
    ) -> None:
        """Log-probabilities of every prompt token but the first are those of the whole distribution at temperature 1, however
        samples are drawn; the most probable tokens are among them. Asking changes no sample."""
        generator.require(capabilities.PROMPT_LOGPROBS)
        sampling, needed = CASES[name]
        for capability in needed:
            generator.require(capability)
        found: dict[int, Sequence[Mapping[int, float]]] = {}
        readers = [
            TokenReader(num_logprobs=NUM_LOGPROBS, on_prompt=partial(found.__setitem__, number)) if number % 2 else None
            for number in range(len(question.seeds))
        ]
        result = generator.handle.generate(question.request(sampling, 0, readers=readers))
        if generator.handle.has(capabilities.PER_SAMPLE_SEEDS):
            plain = generator.generate(question, 0, sampling)
            assert_same_samples(result, plain, range(len(question.seeds)), generator.tolerance)
        assert sorted(found) == list(range(1, len(question.seeds), 2))
        for number, rows in found.items():
            prompt = question.prompts.sequence(number // question.num_samples)
            table = log_softmax(policy.logits(prompt))[:-1] if len(prompt) > 1 else np.zeros((0, 1))
            assert len(rows) == len(prompt) - 1, f"sample {number}: found {len(rows)} rows for a prompt of {len(prompt)} tokens"
            for place, row in enumerate(rows):
                most = set(np.argsort(-table[place])[: NUM_LOGPROBS - 1].tolist())
                assert {int(prompt[place + 1])} | most <= set(row), f"sample {number}, token {place + 1}: found {sorted(row)}"
                for token, logprob in row.items():
                    off = abs(logprob - table[place][token])
                    assert off <= generator.tolerance, f"sample {number}, token {place + 1}: off by {off:.3g}"

    @pytest.mark.parametrize("name", CASES)
    def test_readers_get_the_tokens_of_their_samples(
        self, generator: GeneratorUnderTest, policy: ReferencePolicy, question: Question, name: str
    ) -> None:
        """Tokens come one after another, and are those of the sample in the end. Log-probabilities are of the tokens and of
        the most probable ones, of a plain forward pass. Reading changes no sample."""
        generator.require(capabilities.TOKEN_STREAMING)
        sampling, needed = CASES[name]
        for capability in needed:
            generator.require(capability)
        readings = [Reading() for _ in question.seeds]
        readers = [
            TokenReader(on_tokens=one.take, num_logprobs=NUM_LOGPROBS if number % 2 else None) if number else None
            for number, one in enumerate(readings)
        ]
        result = generator.handle.generate(question.request(sampling, 0, readers=readers))
        if generator.handle.has(capabilities.PER_SAMPLE_SEEDS):
            assert_same_samples(
                result, generator.generate(question, 0, sampling), range(len(question.seeds)), generator.tolerance
            )
        assert readings[0].num_calls == 0
        for number, (response, reading) in enumerate(zip(samples_of(result), readings, strict=True)):
            if number:
                assert reading.tokens == response.tolist(), f"sample {number}: found other tokens than those of its result"
                assert len(reading.logprobs) == (len(response) if number % 2 else 0)
            if reading.logprobs:
                prompt = question.prompts.sequence(number // question.num_samples)
                assert_most_probable(policy, prompt, response, reading.logprobs, sampling, generator.tolerance)

    def test_a_cancelled_reader_ends_its_sample(self, generator: GeneratorUnderTest, question: Question) -> None:
        """A sample whose reader is cancelled at its first token comes as ABORTED with the tokens that it has. All others are
        whole, also those of its own request."""
        generator.require(capabilities.TOKEN_STREAMING)
        generator.require(capabilities.CONTINUOUS)
        long = with_limits(question, [MAX_SEQUENCE_LENGTH] * len(question.seeds))
        reading, endless = Reading(), evolve(PLAIN, stop_token_ids=())
        reader = TokenReader(on_tokens=reading.take)
        reading.then = lambda: None if reader.cancelled.done() else reader.cancelled.set_result(None)
        readers = [reader, *[None] * (len(long.seeds) - 1)]
        feed = stream(generator, ScriptedFeed(first=[long.request(endless, 0, readers=readers)]))
        reasons = [feed.delivered[number].finish_reason for number in range(len(long.seeds))]
        assert reasons[0] == FinishReason.ABORTED, "expected ABORTED of the sample whose reader was cancelled"
        assert FinishReason.ABORTED not in reasons[1:]
        tokens = feed.delivered[0].tokens.tolist()
        assert tokens[: len(reading.tokens)] == reading.tokens[: len(tokens)]
        assert len(tokens) < max(len(feed.delivered[number].tokens) for number in range(1, len(long.seeds)))


def assert_most_probable(
    policy: ReferencePolicy,
    prompt: Int32Array,
    response: Int32Array,
    found: Sequence[Mapping[int, float]],
    sampling: SamplingParams,
    tolerance: float,
) -> None:
    """Assert that log-probabilities beside tokens are those of the most probable ones and of the tokens themselves."""
    logits = policy.logits(np.concatenate([prompt, response]))[len(prompt) - 1 : -1]
    table, _ = sampling_distribution(logits, evolve(sampling, temperature=1.0) if not sampling.temperature else sampling)
    for row, (token, logprobs) in enumerate(zip(response.tolist(), found, strict=True)):
        assert token in logprobs, f"token {row}: its own log-probability is missing"
        off = max(abs(logprob - table[row][one]) for one, logprob in logprobs.items())
        assert off <= tolerance, f"token {row}: a log-probability is off by {off:.3g}"
        least = np.sort(table[row][np.isfinite(table[row])])[-NUM_LOGPROBS:].min()
        most = sum(logprob >= least - tolerance for logprob in logprobs.values())
        assert most >= min(NUM_LOGPROBS, int(np.isfinite(table[row]).sum())), f"token {row}: found {dict(logprobs)}"
