"""rlcore-vllm passes the conformance kit with real engines."""

from functools import partial

import pytest
import torch
from attrs import evolve

from rlcore.registry.binding import build_generator
from rlcore.spi import SetResidencyRequest
from rlcore_conformance import GeneratorConformance
from rlcore_conformance.generators.generator_fixtures import GeneratorUnderTest
from rlcore_conformance.references.fixtures import entry_of, tiny_model
from rlcore_vllm.provider import PROVIDER, disabled_capabilities
from rlcore_vllm.setup.config import VllmConfig


@pytest.fixture(scope="class")
def kept():
    """The class's generator by its context, once it is built."""
    handles = {}
    yield handles
    for handle in handles.values():
        handle.close()


class VllmConformance(GeneratorConformance):
    """An engine takes seconds to start, so the checks of a class share one; what makes it fresh is that it discards its
    weights and its cache."""

    architecture = "qwen3"
    tied = True

    @pytest.fixture
    def provider(self):
        return PROVIDER

    @pytest.fixture
    def config(self):
        return VllmConfig(cpu_kv_cache_gib=0.1)

    @pytest.fixture
    def model(self, tmp_path_factory):
        return self.make_model(tmp_path_factory, 0)

    @pytest.fixture
    def other_model(self, tmp_path_factory):
        return self.make_model(tmp_path_factory, 1)

    @pytest.fixture
    def routed_model(self, tmp_path_factory):
        return self.make_model(tmp_path_factory, 2, "qwen3_moe")

    def make_model(self, tmp_path_factory, seed, architecture=None):
        # vLLM's attention on CPU takes heads of at least 32.
        options = {"hidden_size": 64, "num_heads": 2, "tied": self.tied}
        return tiny_model(tmp_path_factory, seed, architecture or self.architecture, **options)

    @pytest.fixture
    def open_generator(self, provider, config, generator_context, tolerance, kept):
        return partial(opened, provider, config, generator_context, tolerance, kept)

    @pytest.fixture
    def adapted(self, provider, config, many_context, tolerance, kept):
        return opened(provider, config, many_context, tolerance, kept)

    @pytest.fixture
    def many(self, adapted):
        """The same engine, which has room for several adapters."""
        return adapted


def opened(provider, config, context, tolerance, kept):
    if context not in kept:
        while kept:
            kept.popitem()[1].close()
        kept[context] = build_generator(entry_of("generator", provider, context.rank_info.device), context, config)
    kept[context].set_residency(SetResidencyRequest(weights="host", state="host", discard_weights=True))
    kept[context].set_residency(SetResidencyRequest(weights="device", state="device"))
    return GeneratorUnderTest(handle=kept[context], provider=provider, channel=context.channel, tolerance=tolerance)


class TestVllm(VllmConformance):
    """A dense model with tied embeddings, in the trainer's process."""


@pytest.mark.wide
class TestVllmMixtureOfExperts(VllmConformance):
    """Experts, and embeddings that are not tied."""

    architecture = "qwen3_moe"
    tied = False

    @pytest.fixture
    def adapted_context(self):
        pytest.skip("vLLM has no kernels for experts beside adapters on CPU, which `check` says")


@pytest.mark.wide
class TestVllmReplicas(VllmConformance):
    """Two engines in processes of their own."""

    # Each engine reads them by the same code as the one in this process, and would be two more that take seconds to start.
    test_own_weights_are_those_of_the_model = None

    @pytest.fixture
    def config(self):
        return VllmConfig(cpu_kv_cache_gib=0.1, replicas=2)

    @pytest.fixture
    def channel(self):
        return "shared_memory"


@pytest.mark.wide
class TestVllmSpeculative(VllmConformance):
    """Tokens are guessed, and several of a sequence sampled in a step: the same distribution, log-probabilities and refits."""

    # How weights arrive is the same code without guesses, and the first of these starts another engine.
    test_own_weights_are_those_of_the_model = None
    test_refit_that_went_wrong_is_an_error = None
    test_copies_stay_when_the_trainer_moves_on = None
    test_shared_tensors_are_good_for_the_next_refit = None
    test_saved_state_holds_no_weights = None

    @pytest.fixture
    def provider(self, config):
        return evolve(PROVIDER, capabilities=PROVIDER.capabilities - disabled_capabilities(config))

    @pytest.fixture
    def config(self):
        return VllmConfig(cpu_kv_cache_gib=0.1, speculative_ngram=3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestVllmCuda(VllmConformance):
    """An engine in a process of its own, on the trainer's device."""

    @pytest.fixture
    def device(self):
        return "cuda"

    @pytest.fixture
    def channel(self):
        return "cuda_ipc"

    @pytest.fixture
    def config(self):
        return VllmConfig(gpu_memory_utilization=0.1, max_num_seqs=64)

    @pytest.fixture
    def adapted_context(self):
        pytest.skip("vLLM has no kernels in float32 for adapters on CUDA, which `check` says")
