"""The conformance kit: what every ROLE has to pass."""

import pytest
from rlcore_newplugin.provider import PROVIDER

from rlcore_conformance import RoleConformance


class TestNewPlugin(RoleConformance):
    @pytest.fixture
    def provider(self):
        return PROVIDER
