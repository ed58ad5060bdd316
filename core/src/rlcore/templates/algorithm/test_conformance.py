"""The conformance kit: what every algorithm has to pass."""

import pytest
from rlcore_newplugin.provider import PROVIDER

from rlcore.testing import AlgorithmConformance


class TestNewPlugin(AlgorithmConformance):
    @pytest.fixture
    def provider(self):
        return PROVIDER
