"""The conformance kit: what every environment has to pass."""

import pytest
from rlcore_newplugin.provider import PROVIDER

from rlcore_conformance import EnvironmentConformance


class TestNewPlugin(EnvironmentConformance):
    @pytest.fixture
    def provider(self):
        return PROVIDER
