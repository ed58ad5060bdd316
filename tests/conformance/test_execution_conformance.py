"""The core's own execution passes the conformance kit."""

import pytest
from attrs import evolve

from rlcore.registry.own_plugins import EXECUTION
from rlcore_conformance import ExecutionConformance


class TestInProcess(ExecutionConformance):
    @pytest.fixture
    def provider(self):
        return evolve(EXECUTION, name="again")
