"""The conformance kit: what every algorithm has to pass."""

import pytest
from rlcore_newplugin.provider import PROVIDER

from rlcore_conformance import AlgorithmConformance


class TestNewPlugin(AlgorithmConformance):
    @pytest.fixture
    def provider(self):
        return PROVIDER
