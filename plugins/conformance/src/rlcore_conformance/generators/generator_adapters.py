"""Checks of a generator that is sent adapters without the weights that they do not change."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from rlcore.spi import GeneratorContext, LoraSpec, Provider, RlcoreError, capabilities
from rlcore_conformance.generators.generator_fixtures import (
    PLAIN,
    GeneratorFixtures,
    GeneratorUnderTest,
    Question,
    WeightSets,
    load_reference,
    logprob_errors,
    opening,
)
from rlcore_conformance.generators.generator_streaming import assert_tokens_follow_refits
from rlcore_conformance.references.fixtures import require
from rlcore_conformance.references.reference import Float64Array, Reference, ReferencePolicy
from rlcore_conformance.references.tensors import corrupt_value, make_export, values_of

A, B = "lora_A.weight", "lora_B.weight"
Tensors = Mapping[str, Any]


class GeneratorAdapters(GeneratorFixtures):
    """Samples come from the model with the adapters that came last."""

    @pytest.fixture
    def lora(self) -> LoraSpec:
        """Adapters of layers that models with experts have too, with a scale that is not 1."""
        return LoraSpec(rank=3, alpha=6.0, targets=("q_proj", "v_proj", "o_proj"))

    @pytest.fixture
    def adapted_context(self, provider: Provider, generator_context: GeneratorContext, lora: LoraSpec) -> GeneratorContext:
        """The context of a generator that gets adapters apart from the weights."""
        require(provider, capabilities.ADAPTER_REFIT)
        return evolve(generator_context, lora=lora)

    @pytest.fixture
    def adapted(
        self, provider: Provider, config: Any, adapted_context: GeneratorContext, tolerance: float
    ) -> Iterator[GeneratorUnderTest]:
        """A generator that has not been refitted."""
        for build in opening(provider, config, adapted_context, tolerance):
            yield build()

    @pytest.fixture
    def adapter_scale(self) -> float:
        """The standard deviation of the values of A and B."""
        return 0.1

    @pytest.fixture
    def adapters(self, weights: WeightSets, lora: LoraSpec, adapter_scale: float) -> tuple[Tensors, Tensors]:
        """Two sets of A and B of the targets, by name."""
        return random_adapters(weights[0], lora, 1, adapter_scale), random_adapters(weights[0], lora, 2, adapter_scale)

    def test_adapters_change_beside_weights_that_stay(
        self,
        adapted: GeneratorUnderTest,
        reference: Reference,
        weights: WeightSets,
        adapters: tuple[Tensors, Tensors],
        lora: LoraSpec,
        question: Question,
    ) -> None:
        """After each refit, with the same prompts, by adapters alone or with other weights below them."""
        stale: ReferencePolicy | None = None
        for version, (below, which, alone) in enumerate([(0, 0, False), (0, 1, True), (0, 0, True), (1, 1, False)]):
            adapted.refit({**({} if alone else weights[below]), **adapters[which]}, version)
            result = adapted.generate(question, version)
            policy = load_reference(reference, merged_weights(weights[below], adapters[which], lora))
            adapted.assert_logprobs(policy, question, result, when=f"after refit {version} ")
            if stale is not None:
                errors = logprob_errors(stale, question, result, PLAIN)
                assert errors.max() > 10 * adapted.tolerance, "the adapters are too alike to tell stale ones"
            stale = policy

    def test_adapters_that_change_in_flight(
        self,
        adapted: GeneratorUnderTest,
        reference: Reference,
        weights: WeightSets,
        adapters: tuple[Tensors, Tensors],
        lora: LoraSpec,
        question: Question,
    ) -> None:
        """Each token's log-probability is that of the adapters whose version it carries, with all tokens before it."""
        adapted.require(capabilities.IN_FLIGHT_REFIT)
        adapted.require(capabilities.STREAMING)
        adapted.refit({**weights[0], **adapters[0]}, 0)
        policies = [load_reference(reference, merged_weights(weights[0], each, lora)) for each in adapters]
        assert_tokens_follow_refits(adapted, question, policies, lambda version: adapted.refit(adapters[version % 2], version))

    def test_adapters_need_weights_below_them(
        self,
        adapted: GeneratorUnderTest,
        reference: Reference,
        weights: WeightSets,
        adapters: tuple[Tensors, Tensors],
        lora: LoraSpec,
        question: Question,
    ) -> None:
        """Alone they are refused by a fresh generator, and by one whose last refit went wrong; both together put it right."""
        with pytest.raises(RlcoreError):
            adapted.refit(adapters[0], 0)
        adapted.refit({**weights[0], **adapters[0]}, 0)
        with pytest.raises(RlcoreError):
            adapted.refit_export(make_export(adapters[1], 1, change=corrupt_value))
        with pytest.raises(RlcoreError):
            adapted.refit(adapters[1], 1)
        adapted.refit({**weights[0], **adapters[1]}, 2)
        policy = load_reference(reference, merged_weights(weights[0], adapters[1], lora))
        adapted.assert_logprobs(policy, question, adapted.generate(question, 2))


def random_adapters(weights: Tensors, lora: LoraSpec, seed: int, scale: float) -> dict[str, Any]:
    """Normal A and B of standard deviation `scale` for each target, by name."""
    random = np.random.default_rng(seed)
    adapters = {}
    for name, weight in weights.items():
        if not f".{name}".endswith(tuple(f".{target}.weight" for target in lora.targets)):
            continue
        rows, columns = weight.shape
        for key, shape in {A: (lora.rank, columns), B: (rows, lora.rank)}.items():
            adapters[f"{name.removesuffix('weight')}{key}"] = _as(weight, random.normal(0.0, scale, shape))
    return adapters


def merged_weights(weights: Tensors, adapters: Tensors, lora: LoraSpec) -> dict[str, Any]:
    """W + alpha / rank · B A, in float64 and then in the weights' dtype."""
    merged = dict(weights)
    for name, weight in weights.items():
        layer = name.removesuffix("weight")
        if f"{layer}{A}" in adapters:
            a, b = (values_of(adapters[f"{layer}{key}"]).astype(np.float64) for key in (A, B))
            merged[name] = _as(weight, values_of(weight).astype(np.float64) + lora.scale * (b @ a))
    return merged


def _as(weight: Any, values: Float64Array) -> Any:
    """Return values as an array of the weight's library, dtype and device."""
    if isinstance(weight, np.ndarray):
        return values.astype(weight.dtype)
    import torch

    return torch.from_numpy(values).to(weight.device, weight.dtype)
