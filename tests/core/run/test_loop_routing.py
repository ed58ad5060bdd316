"""Where tokens went travels from the generator to the trainer, over several turns, updates and kinds of calls."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from rlcore.registry.discovery import Registry
from rlcore.spi import (
    ROUTED_EXPERTS,
    ConfigError,
    GenerateRequest,
    GenerateResult,
    GeneratorContext,
    LogprobsRequest,
    LogprobsResult,
    PluginError,
    RoutedExperts,
    TokenBatch,
    TrainStepRequest,
    TrainStepResult,
    capabilities,
    hookimpl,
)
from rlcore.spi.arrays import Int16Array, Int32Array, Int64Array, offsets_of
from rlcore.testing.fakes import FAKE_ALGORITHM, FAKE_ENVIRONMENT, FAKE_GENERATOR, FAKE_TRAINER
from rlcore.testing.fakes.generator import FakeGenerator, FakeGeneratorConfig, RunningSamples
from rlcore.testing.fakes.trainer import FakeTrainer

NUM_LAYERS, TOP_K = 3, 2
OPTIONS = (
    "rollout.replay_routing=true",
    "rollout.max_turns=2",
    "rollout.max_response_tokens=30",
    "environment.fake.num_turns=2",
    "algorithm.fake.kl_coefficient=0.1",
    "algorithm.fake.previous_logprobs=true",
    "run.num_steps=2",
)
asked: list[tuple[bool, int]] = []
"""Of each request, whether it wants to know of routing, and its samples."""
carried: list[tuple[str, bool]] = []


def routing(tokens: Int32Array, offsets: Int64Array) -> Int16Array:
    """int16 [T, NUM_LAYERS, TOP_K]: of tokens by what they are and where they stand; -1 at the last of each sequence."""
    positions = np.arange(len(tokens)) - np.repeat(offsets[:-1], np.diff(offsets))
    experts = (tokens + 3 * positions)[:, None, None] + np.arange(NUM_LAYERS)[:, None] + 5 * np.arange(TOP_K)
    experts[offsets[1:] - 1] = -1
    return experts.astype(np.int16)


class RoutedSamples(RunningSamples):
    def result(self, samples: Int64Array) -> GenerateResult:
        result = super().result(samples)
        prompts = [self.request.prompts.sequence(sample // self.request.num_samples) for sample in samples.tolist()]
        responses = np.split(result.tokens, result.offsets[1:-1])
        whole = [np.concatenate(pair) for pair in zip(prompts, responses, strict=True)]
        offsets = offsets_of([len(tokens) for tokens in whole])
        return evolve(result, routed_experts=RoutedExperts(experts=routing(np.concatenate(whole), offsets), offsets=offsets))


class RoutingGenerator(FakeGenerator):
    """Says where tokens went."""

    def __init__(self, context: GeneratorContext, config: FakeGeneratorConfig) -> None:
        super().__init__(context, config)
        assert context.routed_experts

    def begin(self, request: GenerateRequest) -> RunningSamples:
        asked.append((request.routed_experts, len(request.seeds)))
        limits = self.limits(request)
        return RoutedSamples(request, limits) if request.routed_experts else RunningSamples(request, limits)


class RoutedTrainer(FakeTrainer):
    """Looks at what it is told."""

    @hookimpl
    def train_step(self, request: TrainStepRequest) -> TrainStepResult:
        for batch in request.microbatches:
            check("train_step", batch)
        result: TrainStepResult = super().train_step(request)
        return result

    @hookimpl
    def get_logprobs(self, request: LogprobsRequest) -> LogprobsResult:
        for batch in request.microbatches:
            check(request.model, batch)
        result: LogprobsResult = super().get_logprobs(request)
        return result


def check(call: str, batch: TokenBatch) -> None:
    column = batch.token_columns.get(ROUTED_EXPERTS)
    carried.append((call, column is not None))
    if column is not None:
        np.testing.assert_array_equal(column, routing(batch.tokens, batch.offsets))


def registry(*, generator: bool = True, trainer: bool = True) -> Registry:
    """The fakes, of which some know of routing."""
    reports, replays = {capabilities.ROUTED_EXPERTS}, {capabilities.ROUTING_REPLAY}
    generators = evolve(
        FAKE_GENERATOR,
        backend=f"{__name__}:RoutingGenerator",
        capabilities=FAKE_GENERATOR.capabilities | (reports if generator else set()),
    )
    trainers = evolve(
        FAKE_TRAINER,
        backend=f"{__name__}:RoutedTrainer",
        capabilities=FAKE_TRAINER.capabilities | (replays if trainer else set()),
    )
    return Registry.from_providers(
        {
            "trainer": [trainers],
            "generator": [generators],
            "algorithm": [FAKE_ALGORITHM],
            "environment": [FAKE_ENVIRONMENT],
        }
    )


def test_the_trainer_learns_where_each_token_went(run: Callable[..., dict[str, Any]]) -> None:
    asked.clear()
    carried.clear()
    run(*OPTIONS, registry=registry())
    assert set(carried) == {("train_step", True), ("policy", True), ("reference", False)}
    num_episodes = 8 * 8 * 2
    assert num_episodes < sum(number for is_asked, number in asked if is_asked) <= 2 * num_episodes, "two turns"
    assert sum(number for is_asked, number in asked if not is_asked) > 0, "evaluation asks for nothing"


@pytest.mark.parametrize("role", ["generator", "trainer"])
def test_both_sides_have_to_know_of_it(prepared: Callable[..., Any], role: str) -> None:
    with pytest.raises(PluginError, match=r"rollout\.replay_routing = true") as error:
        prepared(*OPTIONS, registry=registry(**{role: False}))
    assert role in str(error.value)


def test_demonstrations_have_no_routing(prepared: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError) as raised:
        prepared(*OPTIONS[:1], "algorithm.fake.source=demonstrations", registry=registry())
    (problem,) = raised.value.problems
    assert problem.path == "rollout.replay_routing"
    assert problem.found.startswith("true, with algorithm 'fake'")
