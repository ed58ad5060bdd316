"""The conformance kit: what every sink has to pass."""

import pytest
from rlcore_newplugin.provider import PROVIDER

from rlcore_conformance import SinkConformance


class TestNewPlugin(SinkConformance):
    @pytest.fixture
    def provider(self):
        return PROVIDER
