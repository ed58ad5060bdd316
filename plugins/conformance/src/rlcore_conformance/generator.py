"""The generator's half of the conformance kit."""

from rlcore_conformance.generators.generator_continuous import GeneratorContinuous
from rlcore_conformance.generators.generator_distribution import GeneratorDistribution
from rlcore_conformance.generators.generator_many_adapters import GeneratorManyAdapters
from rlcore_conformance.generators.generator_routing import GeneratorRouting
from rlcore_conformance.generators.generator_sampling import GeneratorSampling
from rlcore_conformance.generators.generator_sampling_mask import GeneratorSamplingMask
from rlcore_conformance.generators.generator_streaming import GeneratorStreaming
from rlcore_conformance.generators.generator_structured_output import GeneratorStructuredOutput
from rlcore_conformance.generators.generator_token_streaming import GeneratorTokenStreaming
from rlcore_conformance.generators.generator_weights import GeneratorWeights


class GeneratorConformance(
    GeneratorSampling,
    GeneratorDistribution,
    GeneratorWeights,
    GeneratorManyAdapters,
    GeneratorStreaming,
    GeneratorContinuous,
    GeneratorRouting,
    GeneratorSamplingMask,
    GeneratorStructuredOutput,
    GeneratorTokenStreaming,
):
    """The checks that every generator has to pass::

        class TestMine(GeneratorConformance):
            @pytest.fixture
            def provider(self): return PROVIDER

    Fixtures to override where the default does not fit: `config` (the provider's defaults), `device` ("cpu"), `channel`
    ("in_process"), `dtype` (float32, or else the first that the provider declares), `model` (a tiny Qwen3), `weights` (the
    model's own and those of another seed), `tolerance` (in nats, by the dtype), `decode` (the model's tokenizer), `reference`
    (`transformers` on the CPU), `routed_model` (a tiny Qwen3-MoE) and `routed_reference`.
    """
