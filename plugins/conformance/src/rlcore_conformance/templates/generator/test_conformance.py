"""The conformance kit: what every generator has to pass."""

import pytest
from rlcore_newplugin.provider import PROVIDER

from rlcore_conformance import GeneratorConformance


class TestNewPlugin(GeneratorConformance):
    @pytest.fixture
    def provider(self):
        return PROVIDER
