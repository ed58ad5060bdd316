"""The conformance kit: what every trainer has to pass."""

import pytest
from rlcore_newplugin.provider import PROVIDER

from rlcore_conformance import TrainerConformance


class TestNewPlugin(TrainerConformance):
    @pytest.fixture
    def provider(self):
        return PROVIDER
