"""Checks of what a generator says about where a mixture-of-experts model sends tokens."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from rlcore.spi import ModelSpec, Provider, SamplingParams, capabilities
from rlcore_conformance.generators.generator_fixtures import (
    EDGE,
    GeneratorFixtures,
    OpenGenerator,
    assert_same_samples,
    make_question,
    samples_of,
)
from rlcore_conformance.references.fixtures import Device, require
from rlcore_conformance.references.reference import RoutedPolicy
from rlcore_conformance.references.tensors import Values, values_of

VOCABULARY_SIZE = 32
"""Tokens that prompts are made of."""


class GeneratorRouting(GeneratorFixtures):
    """The experts reported are those that a plain forward pass chooses."""

    def test_routed_experts_equal_the_reference(
        self,
        provider: Provider,
        open_routed: OpenGenerator,
        routed_model: ModelSpec,
        routed_reference: Callable[[Values], RoutedPolicy],
        device: Device,
        tolerance: float,
    ) -> None:
        """Each token of prompt and response but the last has them, in any order; asking for them changes nothing else."""
        require(provider, capabilities.ROUTED_EXPERTS)
        from safetensors.torch import load_file

        weights = load_file(Path(routed_model.path) / "model.safetensors", device=device)
        policy = routed_reference({name: values_of(value) for name, value in weights.items()})
        generator, question = open_routed(), make_question(VOCABULARY_SIZE)
        generator.refit(weights, 0)
        plain = generator.generate(question)
        assert plain.routed_experts is None
        result = generator.handle.generate(question.request(SamplingParams(), 0, routed_experts=True))
        assert_same_samples(result, plain, range(len(question.seeds)), tolerance)
        assert result.routed_experts is not None
        routed = np.split(result.routed_experts.experts, result.routed_experts.offsets[1:-1])
        for index, (response, found) in enumerate(zip(samples_of(result), routed, strict=True)):
            tokens = np.concatenate([question.prompts.sequence(index // question.num_samples), response])
            experts, margins = policy.choices(tokens)
            assert found.shape == experts.shape, f"sample {index}: found {found.shape}; expected {experts.shape}"
            wrong = (np.sort(found, -1) != np.sort(experts, -1)).any(-1) & (margins > EDGE)
            unknown = (found[-1] < 0).all() and len(response) > 0
            wrong[-1] &= not unknown
            assert not wrong.any(), f"sample {index}: other experts than the model's at token, layer {np.argwhere(wrong)[0]}"
