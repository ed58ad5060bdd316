"""Checks of what happens while a generator generates: samples handed out one by one, and weights that change under way."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeAlias

import numpy as np
import pytest
from attrs import evolve

from rlcore.spi import GenerateResult, RlcoreError, capabilities
from rlcore_conformance.generators.generator_fixtures import (
    MAX_SEQUENCE_LENGTH,
    PLAIN,
    GeneratorFixtures,
    GeneratorUnderTest,
    Question,
    WeightSets,
    load_reference,
    logprob_errors,
    samples_of,
)
from rlcore_conformance.references.reference import Reference, ReferencePolicy

ATTEMPTS = 20
"""A generator may be done before new weights reach it; one that always is has not taken them in flight."""


class GeneratorStreaming(GeneratorFixtures):
    """Samples as they end, refits in flight, and weights that need not be kept."""

    def test_each_sample_is_handed_out_once(self, generator: GeneratorUnderTest, question: Question) -> None:
        """Each sample is delivered once, equal to its part of the whole result."""
        generator.require(capabilities.STREAMING)
        handed: list[tuple[int, GenerateResult]] = []
        result = generator.generate(question, on_finished=lambda sample, one: handed.append((sample, one)))
        assert sorted(sample for sample, _ in handed) == list(range(len(question.seeds))), "expected each sample exactly once"
        tokens, logprobs = samples_of(result), np.split(result.logprobs, result.offsets[1:-1])
        for sample, one in handed:
            np.testing.assert_array_equal(one.tokens, tokens[sample])
            np.testing.assert_array_equal(one.logprobs, logprobs[sample])
            np.testing.assert_array_equal(one.offsets, [0, len(tokens[sample])])
            assert one.finish_reasons.tolist() == [result.finish_reasons[sample]]

    def test_weights_that_change_in_flight(
        self, generator: GeneratorUnderTest, reference: Reference, weights: WeightSets, question: Question
    ) -> None:
        """Each token's log-probability is that of the weights whose version it carries, with all tokens before it."""
        generator.require(capabilities.IN_FLIGHT_REFIT)
        generator.require(capabilities.STREAMING)
        policies = [load_reference(reference, one) for one in weights]
        assert_tokens_follow_refits(
            generator, question, policies, lambda version: generator.refit(weights[version % 2], version)
        )

    def test_discarded_weights_do_not_count(
        self, generator: GeneratorUnderTest, policy: ReferencePolicy, weights: WeightSets, question: Question
    ) -> None:
        """Nothing is generated from them; a refit after they are back in place makes the generator fit again."""
        generator.require(capabilities.DISCARD_WEIGHTS)
        generator.generate(question)
        generator.move("host", "host", discard_weights=True)
        generator.move("device", "host")
        generator.move("device", "device")
        with pytest.raises(RlcoreError):
            generator.generate(question)
        generator.move("host", "host", discard_weights=True)
        generator.wake_and_refit(weights[0], 1)
        generator.assert_logprobs(policy, question, generator.generate(question, 1))


def assert_tokens_follow_refits(
    generator: GeneratorUnderTest,
    question: Question,
    policies: Sequence[ReferencePolicy],
    refit: Callable[[int], None],
    sample: "SampleAndCall | None" = None,
) -> None:
    """While `refit` brings a generator at version 0 to the next versions, each token is of the policy of its own: of the first
    at even versions, of the second at odd ones. `sample` is a call of `generate` unless given."""
    long = evolve(question, max_tokens=np.full(len(question.seeds), MAX_SEQUENCE_LENGTH, np.int32))
    long.max_tokens[0] = 1
    for old in range(ATTEMPTS):
        result = _refitted_under_way(partial(sample or generated, generator, long, old), partial(refit, old + 1))
        assert set(np.unique(result.weight_versions)) <= {old, old + 1}
        of_new = result.weight_versions == old + 1
        errors = [logprob_errors(policy, long, result, PLAIN) for policy in policies]
        found = np.where(of_new, errors[(old + 1) % 2], errors[old % 2])
        assert found.max() <= generator.tolerance, f"log-probabilities are off by up to {found.max():.3g} nats"
        if of_new.any():
            other = np.where(of_new, errors[old % 2], errors[(old + 1) % 2])
            assert other[of_new].max() > 10 * generator.tolerance, "the two sets of weights are too alike to tell them apart"
            return
    pytest.fail("no token carries the new version: refit waits until all samples have ended")


SampleAndCall: TypeAlias = Callable[[GeneratorUnderTest, Question, int, Callable[[], None]], GenerateResult]
"""Samples a question at a version, and calls a function once its first sample has ended."""


def generated(generator: GeneratorUnderTest, question: Question, version: int, then: Callable[[], None]) -> GenerateResult:
    """A SampleAndCall by one call of `generate`."""
    return generator.generate(question, version, on_finished=lambda sample, one: then())  # noqa: ARG005


def _refitted_under_way(sample: Callable[[Callable[[], None]], GenerateResult], refit: Callable[[], None]) -> GenerateResult:
    """The samples, with a refit as soon as the first has ended."""
    ended = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(sample, ended.set)
        while not ended.wait(0.1) and not answer.done():
            pass
        refit()
        return answer.result()
