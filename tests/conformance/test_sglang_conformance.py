"""rlcore-sglang passes the conformance kit with a real engine; docs/sglang.md says how SGLang is installed."""

from functools import partial

import pytest
import torch
from attrs import evolve

from rlcore_sglang.requirements import unavailable

if missing := unavailable():
    pytest.skip(missing, allow_module_level=True)

from rlcore.registry.binding import build_generator
from rlcore.spi import SetResidencyRequest
from rlcore_conformance import GeneratorConformance
from rlcore_conformance.generators.generator_fixtures import GeneratorUnderTest
from rlcore_conformance.references.fixtures import entry_of, tiny_model
from rlcore_sglang.config import SglangConfig
from rlcore_sglang.provider import PROVIDER


@pytest.fixture(scope="class")
def kept():
    """The class's generators by their contexts, once they are built."""
    handles = {}
    yield handles
    for handle in handles.values():
        handle.close()


class SglangConformance(GeneratorConformance):
    """An engine takes most of a minute to start, so the checks share one; what makes it fresh is that its weights are
    discarded."""

    @pytest.fixture
    def provider(self):
        return PROVIDER

    @pytest.fixture
    def open_generator(self, provider, config, generator_context, tolerance, kept):
        return partial(opened, provider, config, generator_context, tolerance, kept)


class TestSglang(SglangConformance):
    @pytest.fixture
    def config(self):
        return SglangConfig(max_total_tokens=16384)

    @pytest.fixture
    def channel(self):
        return "shared_memory"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestSglangCuda(SglangConformance):
    """In bfloat16, which SGLang's own attention on GPUs takes, with heads of a size that it has kernels for."""

    @pytest.fixture
    def device(self):
        return "cuda"

    @pytest.fixture
    def channel(self):
        return "directory"

    @pytest.fixture
    def dtype(self):
        return "bfloat16"

    @pytest.fixture
    def model(self, tmp_path_factory, dtype):
        return self.make_model(tmp_path_factory, 0, dtype)

    @pytest.fixture
    def other_model(self, tmp_path_factory, dtype):
        return self.make_model(tmp_path_factory, 1, dtype)

    def make_model(self, tmp_path_factory, seed, dtype):
        return evolve(tiny_model(tmp_path_factory, seed, hidden_size=128, num_heads=2), dtype=dtype)

    @pytest.fixture
    def config(self):
        return SglangConfig(
            max_total_tokens=16384,
            mem_fraction_static=0.1,
            max_running_requests=64,
            engine={"disable_prefill_cuda_graph": True},
        )


def opened(provider, config, context, tolerance, kept):
    if context not in kept:
        kept[context] = build_generator(entry_of("generator", provider, context.rank_info.device), context, config)
    kept[context].set_residency(SetResidencyRequest(weights="host", state="host", discard_weights=True))
    kept[context].set_residency(SetResidencyRequest(weights="device", state="device"))
    return GeneratorUnderTest(handle=kept[context], provider=provider, channel=context.channel, tolerance=tolerance)
