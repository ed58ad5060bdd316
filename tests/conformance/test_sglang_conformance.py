"""rlcore-sglang passes the conformance kit with a real engine on the CPU; docs/sglang.md says how SGLang is installed."""

from functools import partial

import pytest

from rlcore_sglang.requirements import unavailable

if missing := unavailable():
    pytest.skip(missing, allow_module_level=True)

from rlcore.registry.binding import build_generator
from rlcore.spi import SetResidencyRequest
from rlcore.testing import GeneratorConformance
from rlcore.testing.conformance.fixtures import entry_of
from rlcore.testing.conformance.generator_fixtures import GeneratorUnderTest
from rlcore_sglang.config import SglangConfig
from rlcore_sglang.provider import PROVIDER


@pytest.fixture(scope="class")
def kept():
    """The class's generators by their contexts, once they are built."""
    handles = {}
    yield handles
    for handle in handles.values():
        handle.close()


class TestSglang(GeneratorConformance):
    """An engine takes most of a minute to start, so the checks share one; what makes it fresh is that its weights are
    discarded."""

    @pytest.fixture
    def provider(self):
        return PROVIDER

    @pytest.fixture
    def config(self):
        return SglangConfig(max_cached_tokens=16384)

    @pytest.fixture
    def channel(self):
        return "shared_memory"

    @pytest.fixture
    def open_generator(self, provider, config, generator_context, tolerance, kept):
        return partial(opened, provider, config, generator_context, tolerance, kept)


def opened(provider, config, context, tolerance, kept):
    if context not in kept:
        kept[context] = build_generator(entry_of("generator", provider, context.rank_info.device), context, config)
    kept[context].set_residency(SetResidencyRequest(weights="host", state="host", discard_weights=True))
    kept[context].set_residency(SetResidencyRequest(weights="device", state="device"))
    return GeneratorUnderTest(handle=kept[context], provider=provider, channel=context.channel, tolerance=tolerance)
