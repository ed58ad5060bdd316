"""Streams of one generator: samples with their texts, by requests that join or in waves."""

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from rlcore.registry.binding import build_generator, build_trainer
from rlcore.registry.discovery import Registry
from rlcore.run.execution.groups import InProcessGenerator
from rlcore.run.execution.streams import not_begun
from rlcore.spi import (
    ContractError,
    ExportWeightsRequest,
    FinishReason,
    GenerateRequest,
    GeneratorContext,
    ModelSpec,
    RaggedTokens,
    RankInfo,
    RefitRequest,
    SamplingParams,
    TrainerContext,
    capabilities,
)
from rlcore.testing.fakes import FakeTokenizer
from rlcore.testing.fakes.generator import FakeGeneratorConfig
from rlcore.testing.fakes.providers import FAKE_GENERATOR, FAKE_TRAINER
from rlcore.testing.fakes.trainer import FakeTrainerConfig
from rlcore_rollout.episode import Completion, CompletionRequest
from rlcore_rollout.request_queue import RequestQueue

MODEL = ModelSpec(path="none")
PROMPTS = [np.array(prompt, np.int32) for prompt in ([1, 2], [3], [4, 5, 6])]
KINDS = {
    "continuous": frozenset[str](),
    "streaming": frozenset({capabilities.CONTINUOUS}),
    "waves": frozenset({capabilities.CONTINUOUS, capabilities.STREAMING}),
}
"""What a generator of each kind does not declare."""


@pytest.fixture(params=KINDS)
def generator(request: pytest.FixtureRequest) -> InProcessGenerator:
    """A generator of each kind, at version 0."""
    provider = evolve(FAKE_GENERATOR, capabilities=FAKE_GENERATOR.capabilities - KINDS[request.param])
    registry = Registry.from_providers({"trainer": [FAKE_TRAINER], "generator": [provider]})
    context = TrainerContext(
        model=MODEL, rank_info=RankInfo(), seed=3, num_train_steps=4, needs_reference=False, max_sequence_length=16
    )
    trainer = build_trainer(registry.of("trainer")[0], context, FakeTrainerConfig(initial_scale=0.5))
    export = trainer.export_weights(ExportWeightsRequest(weight_version=0, dtype="float32", max_bucket_bytes=2**20))
    handle = build_generator(
        registry.of("generator")[0],
        GeneratorContext(model=MODEL, rank_info=RankInfo(), seed=0, max_sequence_length=16),
        FakeGeneratorConfig(),
    )
    handle.refit(RefitRequest(weight_version=0, channel="in_process", weights=export, may_alias=False))
    return InProcessGenerator(handle=handle, decoder=FakeTokenizer())


class Ending(RequestQueue):
    """Ends once so many samples were handed out, and asks for another one at the first."""

    def __init__(self, num_samples: int, late: Sequence[CompletionRequest] = ()) -> None:
        super().__init__(self.keep)
        self.num_samples, self.late = num_samples, late
        self.found: list[Completion] = []
        self.lock = threading.Lock()

    def keep(self, handed: Sequence[Completion]) -> None:
        with self.lock:
            self.found += handed
            late, self.late = self.late, ()
            if late:
                self.ask(late)
            if len(self.found) >= self.num_samples:
                self.end()


def wanted(prompt: int, seed: int, max_tokens: int, sampling: SamplingParams | None = None) -> CompletionRequest:
    return CompletionRequest(
        prompt=PROMPTS[prompt], seed=seed, max_tokens=max_tokens, sampling=sampling or SamplingParams(), owner=(prompt, seed)
    )


def alone(generator: InProcessGenerator, one: CompletionRequest) -> tuple[list[int], str]:
    """What a request for this sample alone brings."""
    request = GenerateRequest(
        prompts=RaggedTokens.from_lists([one.prompt.tolist()]),
        num_samples=1,
        seeds=np.array([one.seed]),
        max_tokens=np.array([one.max_tokens], np.int32),
        sampling=one.sampling,
        weight_version=0,
    )
    tokens = generator.handle.generate(request).tokens
    return tokens.tolist(), generator.decoder.decode(tokens)


def test_samples_are_those_of_generate_with_their_texts(generator: InProcessGenerator) -> None:
    cold = SamplingParams(temperature=0.5)
    asked = [wanted(prompt, seed, 3 + prompt + seed) for prompt in (0, 1, 2) for seed in (0, 1)]
    late = [wanted(0, 7, 5), wanted(1, 8, 2, cold)]
    feed = Ending(num_samples=8, late=late)
    feed.begin(0)
    feed.ask(asked)
    generator.stream(feed, 0)
    assert {one.request.owner for one in feed.found} == {one.owner for one in (*asked, *late)}
    assert len(feed.found) == 8
    assert feed.num_outstanding == 0
    for one in feed.found:
        assert (one.tokens.tolist(), one.text) == alone(generator, one.request)
        assert one.finish_reason == FinishReason.LENGTH
        assert (one.weight_versions == 0).all()


def test_what_has_not_ended_comes_back(generator: InProcessGenerator) -> None:
    """Requests that wait in the generator too; those that wait in the feed stay there."""
    samplings = [SamplingParams(temperature=temperature) for temperature in (1.0, 0.5, 0.25)]
    asked = [wanted(0, seed, 2 + 8 * seed, sampling) for seed, sampling in enumerate(samplings)]
    feed = Ending(num_samples=1, late=[wanted(1, 5, 3)])
    feed.begin(0)
    feed.ask(asked)
    generator.stream(feed, 0)
    assert sorted(one.request.owner for one in feed.found) == [(0, 0), (0, 1), (0, 2)]
    assert feed.num_outstanding == 1
    for one in feed.found:
        tokens, _ = alone(generator, one.request)
        assert one.tokens.tolist() == tokens[: len(one.tokens)]
    assert feed.found[0].finish_reason == FinishReason.LENGTH
    assert {one.finish_reason for one in feed.found[1:]} == {FinishReason.ABORTED}
    feed.num_samples = 4
    feed.begin(0)
    generator.stream(feed, 0)
    assert feed.found[-1].request.owner == (1, 5)


def test_a_tokenizer_that_fails_ends_the_stream_with_its_error(generator: InProcessGenerator) -> None:
    class Failing(FakeTokenizer):
        def decode_batch(self, tokens: Any) -> list[str]:
            raise OverflowError("a token that it does not know")

    feed = Ending(num_samples=9)
    feed.begin(0)
    feed.ask([wanted(0, 0, 3)])
    with pytest.raises(OverflowError):
        evolve(generator, decoder=Failing()).stream(feed, 0)
    assert not feed.found
    feed.requeue()
    assert feed.num_outstanding == 1


def test_a_request_newer_than_the_weights_is_refused(generator: InProcessGenerator) -> None:
    feed = Ending(num_samples=9)
    feed.begin(1)
    feed.ask([wanted(0, 0, 3)])
    with pytest.raises(ContractError, match="weight version 1"):
        generator.stream(feed, 0)


def test_samples_that_have_not_begun_are_aborted_and_empty() -> None:
    responses = not_begun(2)
    assert responses.result.finish_reasons.tolist() == [FinishReason.ABORTED] * 2
    assert responses.result.offsets.tolist() == [0, 0, 0]
    assert responses.texts == ["", ""]
