"""Checks of a generator that holds several adapters of one model: each samples as it does alone."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from rlcore.spi import (
    FinishReason,
    GenerateRequest,
    GenerateResult,
    GeneratorContext,
    LoraSpec,
    Provider,
    RlcoreError,
    capabilities,
)
from rlcore_conformance.generators.feeds import ScriptedFeed
from rlcore_conformance.generators.generator_adapters import GeneratorAdapters, Tensors, merged_weights, random_adapters
from rlcore_conformance.generators.generator_continuous import joined, stream, with_limits
from rlcore_conformance.generators.generator_fixtures import (
    MAX_SEQUENCE_LENGTH,
    PLAIN,
    GeneratorUnderTest,
    Question,
    WeightSets,
    assert_same_samples,
    load_reference,
    logprob_errors,
    make_question,
    opening,
)
from rlcore_conformance.generators.generator_streaming import ATTEMPTS
from rlcore_conformance.references.fixtures import require
from rlcore_conformance.references.reference import Reference, ReferencePolicy

NAMES = ("", "one", "two")
VERSIONS = {"": 4, "one": 0, "two": 2}
"""The version that each adapter has at first."""
MAX_ADAPTERS = 3


class GeneratorManyAdapters(GeneratorAdapters):
    """The capability `many_adapters`."""

    @pytest.fixture
    def many_context(self, provider: Provider, adapted_context: GeneratorContext) -> GeneratorContext:
        """The context of a generator of several adapters."""
        require(provider, capabilities.MANY_ADAPTERS)
        return evolve(adapted_context, max_adapters=MAX_ADAPTERS)

    @pytest.fixture
    def many(
        self, provider: Provider, config: Any, many_context: GeneratorContext, tolerance: float
    ) -> Iterator[GeneratorUnderTest]:
        """A generator that has not been refitted."""
        for build in opening(provider, config, many_context, tolerance):
            yield build()

    @pytest.fixture
    def tensors(self, weights: WeightSets, lora: LoraSpec, adapter_scale: float) -> Mapping[str, Tensors]:
        """A and B of each of NAMES, and of "new"."""
        names = (*NAMES, "new")
        return {name: random_adapters(weights[0], lora, seed, adapter_scale) for seed, name in enumerate(names)}

    @pytest.fixture
    def holding(self, many: GeneratorUnderTest, weights: WeightSets, tensors: Mapping[str, Tensors]) -> GeneratorUnderTest:
        """A generator that holds the adapters NAMES at VERSIONS: the first came with the weights, the others alone."""
        hold(many, weights[0], tensors)
        return many

    @pytest.fixture
    def adapted_policies(
        self, reference: Reference, weights: WeightSets, tensors: Mapping[str, Tensors], lora: LoraSpec
    ) -> Mapping[str, ReferencePolicy]:
        """The reference with each adapter merged in."""
        return {name: load_reference(reference, merged_weights(weights[0], one, lora)) for name, one in tensors.items()}

    def test_each_adapter_samples_as_it_does_alone(
        self,
        holding: GeneratorUnderTest,
        weights: WeightSets,
        tensors: Mapping[str, Tensors],
        adapted_policies: Mapping[str, ReferencePolicy],
        question: Question,
    ) -> None:
        """Samples and log-probabilities by name, in turns and over again, are those of a generator of that adapter alone."""
        order = range(len(question.seeds))
        held = {}
        for name in (*NAMES, *NAMES):
            result = held[name] = holding.generate(question, VERSIONS[name], adapter=name)
            assert set(result.weight_versions.tolist()) == {VERSIONS[name]}, f"tokens of {name!r} carry another's version"
            holding.assert_logprobs(adapted_policies[name], question, result, when=f"of the adapter {name!r} ")
            other = adapted_policies[NAMES[NAMES.index(name) - 1]]
            errors = logprob_errors(other, question, result, PLAIN)
            assert errors.max() > 10 * holding.tolerance, "the adapters are too alike to tell them apart"
        if holding.handle.has(capabilities.PER_SAMPLE_SEEDS):
            for name in NAMES:
                holding.refit({**weights[0], **tensors[name]}, 0, adapter=name)
                alone = holding.generate(question, 0, adapter=name)
                assert_same_samples(held[name], alone, order, holding.tolerance)

    def test_one_batch_has_samples_of_several_adapters(
        self, holding: GeneratorUnderTest, reference: Reference, adapted_policies: Mapping[str, ReferencePolicy]
    ) -> None:
        """Requests of one stream, with the same prompts and seeds, each by its own adapter."""
        holding.require(capabilities.CONTINUOUS)
        question = make_question(reference.vocab_size)
        feed = stream(holding, ScriptedFeed(first=[by(question, name) for name in NAMES]), VERSIONS[NAMES[0]])
        count = len(question.seeds)
        for number, name in enumerate(NAMES):
            result = joined(feed, number * count, count)
            assert set(result.weight_versions.tolist()) == {VERSIONS[name]}, f"tokens of {name!r} carry another's version"
            holding.assert_logprobs(adapted_policies[name], question, result, when=f"of the adapter {name!r} ")

    def test_refit_of_one_adapter_leaves_others(
        self,
        holding: GeneratorUnderTest,
        tensors: Mapping[str, Tensors],
        adapted_policies: Mapping[str, ReferencePolicy],
        question: Question,
    ) -> None:
        """Its own samples are of the new values, also of prompts that it has seen; those of the others stay as they were."""
        before = {name: holding.generate(question, VERSIONS[name], adapter=name) for name in NAMES}
        holding.refit(tensors["new"], 7, adapter="one")
        result = holding.generate(question, 7, adapter="one")
        assert set(result.weight_versions.tolist()) == {7}, "tokens carry another version than the refit's"
        holding.assert_logprobs(adapted_policies["new"], question, result, when="after the refit ")
        for name in ("", "two"):
            after = holding.generate(question, VERSIONS[name], adapter=name)
            assert set(after.weight_versions.tolist()) == {VERSIONS[name]}, f"the refit changed the version of {name!r}"
            holding.assert_logprobs(adapted_policies[name], question, after, when=f"of {name!r}, which was not refitted, ")
            if holding.handle.has(capabilities.PER_SAMPLE_SEEDS):
                assert_same_samples(after, before[name], range(len(question.seeds)), holding.tolerance)

    def test_dropped_adapters_make_room(
        self,
        holding: GeneratorUnderTest,
        tensors: Mapping[str, Tensors],
        adapted_policies: Mapping[str, ReferencePolicy],
        question: Question,
    ) -> None:
        """Requests of dropped and unknown adapters are refused; another adapter takes the place, and the rest stay."""
        with pytest.raises(RlcoreError):
            holding.generate(question, 0, adapter="new")
        with pytest.raises(RlcoreError):
            holding.generate(question, VERSIONS["two"], adapter="one")
        with pytest.raises(RlcoreError):
            holding.refit(tensors["new"], 0, adapter="new")  # a fourth
        holding.generate(question, VERSIONS["one"], adapter="one")
        holding.refit(tensors["new"], 0, adapter="new", drops=["one"])
        with pytest.raises(RlcoreError):
            holding.generate(question, VERSIONS["one"], adapter="one")
        versions = {"": VERSIONS[""], "two": VERSIONS["two"], "new": 0}
        for name, version in versions.items():
            result = holding.generate(question, version, adapter=name)
            holding.assert_logprobs(
                adapted_policies[name], question, result, when=f"of {name!r}, beside one that was dropped, "
            )

    def test_weights_below_forget_other_adapters(
        self,
        holding: GeneratorUnderTest,
        reference: Reference,
        weights: WeightSets,
        tensors: Mapping[str, Tensors],
        lora: LoraSpec,
        question: Question,
    ) -> None:
        """Other weights of the model come with one adapter. The others are refused until they are brought again."""
        holding.refit({**weights[1], **tensors["one"]}, 5, adapter="one")
        for name in ("", "two"):
            with pytest.raises(RlcoreError):
                holding.generate(question, VERSIONS[name], adapter=name)
        holding.refit(tensors["two"], 6, adapter="two")
        for name, version in {"one": 5, "two": 6}.items():
            policy = load_reference(reference, merged_weights(weights[1], tensors[name], lora))
            result = holding.generate(question, version, adapter=name)
            holding.assert_logprobs(policy, question, result, when=f"of {name!r}, with other weights below, ")

    def test_adapters_change_while_others_sample(
        self,
        many: GeneratorUnderTest,
        weights: WeightSets,
        tensors: Mapping[str, Tensors],
        adapted_policies: Mapping[str, ReferencePolicy],
        question: Question,
    ) -> None:
        """While a stream samples of three adapters, one is refitted and one makes room for another. Tokens of the first follow
        its versions, those of the second end, and the third is as before."""
        many.require(capabilities.CONTINUOUS)
        many.require(capabilities.IN_FLIGHT_REFIT)
        long = with_limits(question, [1, *[MAX_SEQUENCE_LENGTH] * (len(question.seeds) - 1)])
        changed = cut = False
        for _ in range(ATTEMPTS):  # all may have ended before a busy machine comes to the refit
            hold(many, weights[0], tensors)
            results = dict(zip(NAMES, changed_under_way(many, long, tensors["new"]), strict=True))
            many.assert_logprobs(adapted_policies[""], long, results[""], when="of an adapter that stays ")
            many.assert_logprobs(adapted_policies["two"], long, results["two"], when="of an adapter that is dropped ")
            assert set(results[""].weight_versions.tolist()) == {VERSIONS[""]}, "a refit of another changed its version"
            versions = results["one"].weight_versions
            assert set(versions.tolist()) <= {0, 1}, "tokens carry a version that their adapter never had"
            errors = [logprob_errors(adapted_policies[name], long, results["one"], PLAIN) for name in ("one", "new")]
            found = np.where(versions == 1, errors[1], errors[0])
            greatest = found.max(initial=0.0)
            assert greatest <= many.tolerance, f"log-probabilities are off by up to {greatest:.3g} nats"
            changed |= bool((versions == 1).any())
            cut |= bool((results["two"].finish_reasons == FinishReason.ABORTED).any())
            if changed and cut:
                return
        pytest.fail("no token carries the new version, or no sample of the dropped adapter was cut")


def hold(generator: GeneratorUnderTest, weights: Mapping[str, Any], tensors: Mapping[str, Tensors]) -> None:
    """Bring the adapters NAMES at VERSIONS: the first with the weights, the others alone."""
    for number, name in enumerate(NAMES):
        generator.refit({**({} if number else weights), **tensors[name]}, VERSIONS[name], adapter=name)


def by(question: Question, adapter: str) -> GenerateRequest:
    """The request of a question to one of NAMES."""
    return question.request(PLAIN, VERSIONS[adapter], adapter=adapter)


def changed_under_way(generator: GeneratorUnderTest, question: Question, new: Tensors) -> Sequence[GenerateResult]:
    """The samples of each of NAMES, of one stream. Once the first sample has ended, "one" gets new values as version 1, and
    "two" makes room for "three"."""
    ended = threading.Event()

    def then() -> list[GenerateRequest]:
        ended.set()
        return []

    feed = ScriptedFeed(first=[by(question, name) for name in NAMES], then=then)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(stream, generator, feed, VERSIONS[NAMES[0]])
        while not ended.wait(0.1) and not call.done():
            pass
        generator.refit(new, 1, adapter="one")
        generator.refit(new, 0, adapter="three", drops=["two"])
        call.result()
    count = len(question.seeds)
    return [joined(feed, number * count, count) for number in range(len(NAMES))]
